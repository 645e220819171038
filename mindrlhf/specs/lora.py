"""Low-rank adapters of weight matrices: which matrices have one, and the rules of its two factors.

Hu et al. 2021, arXiv:2106.09685, section 4.1: W + s B A, where W [out, in] stays as it is and A [rank, in] and
B [out, rank] are trained. A Hugging Face matrix has an adapter of its own also where MindFormers fuses several into
one parameter: then A is theirs, stacked, and the rows of B are fused as those of W.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import ModelDims
from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.rules import LAYERS, ParameterRule
from mindrlhf.specs.scoring import SCORE_NAME

ROLES = ("attention", "mlp")
DOWN, UP = "lora_A", "lora_B"
# What the parameters begin with that hold the factor s in graphs, one for each pipeline stage: they are no weights.
SCALE_NAME = "lora_scale"


@dataclass(frozen=True)
class LoraOptions:
    """Options of the adapters of a model.

    Attributes:
        rank: of every adapter.
        alpha: the numerator of the scale s.
        targets: roles of the matrices that have one, of ``ROLES``; empty means all that the model has.
        rank_stabilised: s is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732) instead of alpha / rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    rank_stabilised: bool = False

    @property
    def scale(self) -> float:
        """The factor s of B A."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


@dataclass(frozen=True)
class Adapter:
    """The adapter of one MindFormers parameter.

    Attributes:
        base: the rule of the parameter.
        down: the rule of A: the factors of its Hugging Face matrices stacked, [parts * rank, in].
        up: the rule of B, fused as the rows of the parameter, [out, rank].
    """

    base: ParameterRule
    down: ParameterRule
    up: ParameterRule

    @property
    def layer(self) -> int:
        """The number of the decoder layer that it is in."""
        return int(self.base.mf_name.removeprefix(LAYERS).partition(".")[0])


def adapters(spec: ModelSpec, dims: ModelDims, options: LoraOptions) -> list[Adapter]:
    """Return the adapters of a model, in the order of the forward pass.

    Raises:
        UserError: the model has no matrix of a role that ``targets`` names.
    """
    rules = [(role_of(rule, dims), rule) for rule in spec.rules(dims)]
    present = {role for role, _ in rules if role in ROLES}
    for role in options.targets:
        if role not in present:
            raise UserError(
                f"'lora.targets' names {role}, which a model of {spec.hf_architecture} with these sizes does not have: "
                f"it has {', '.join(sorted(present))}"
            )
    wanted = set(options.targets) or present
    return [_adapter(rule, options.rank) for role, rule in rules if role in wanted]


def role_of(rule: ParameterRule, dims: ModelDims) -> str | None:
    """Return the role of a matrix in its layer: one of ``ROLES``, or "experts" without adapters; else None."""
    if not rule.mf_name.startswith(LAYERS) or len(rule.shape(dims)[0]) != 2 or not rule.is_hidden_matrix:
        return None
    part = rule.mf_name.removeprefix(LAYERS).partition(".")[2]
    if part.startswith("self_attention."):
        return "attention"
    if part.startswith("mlp.experts."):
        return "experts"
    return "mlp" if part.startswith("mlp.") and not part.startswith("mlp.router.") else None


class AdaptedRules:
    """The parameters of a model whose adapters are trained, in place of its spec where only the rules are asked for.

    They are those of the model, of which the projection of a scoring model alone is trained, and the factors. MindSpore
    shards with the optimiser what is not trained too. Factors are small, and a rank adds their product to its shard of
    the matrix: so they are left whole.
    """

    def __init__(self, spec: ModelSpec, dims: ModelDims, options: LoraOptions):
        self.is_scorer = spec.is_scorer
        self.adapters = adapters(spec, dims, options)
        base = [replace(rule, trained=rule.mf_name == SCORE_NAME) for rule in spec.rules(dims)]
        self._rules = base + [rule for one in self.adapters for rule in (one.down, one.up)]

    def rules(self, _: ModelDims) -> list[ParameterRule]:
        """Return the rules of the model that this was made for."""
        return self._rules

    def trained(self) -> list[ParameterRule]:
        """Return the rules of what is trained, which is what an adapter's files hold."""
        return [rule for rule in self._rules if rule.trained]


def module_names(names: Sequence[str]) -> list[str]:
    """Return the names of modules whose weights are ``names``."""
    return [name.removesuffix(".weight") for name in names]


def _adapter(base: ParameterRule, rank: int) -> Adapter:
    modules = module_names(base.hf_names)
    down = replace(
        base,
        hf_names=tuple(f"{name}.{DOWN}.weight" for name in modules),
        mf_name=f"{_stem(base)}.{DOWN}",
        transform="stack",
        shape=lambda dims: tuple((rank, columns) for _, columns in base.shape(dims)),
        shard_axis=1 if base.shard_axis == 1 else None,
        keeps_whole=True,
        keeps_float32=True,
    )
    up = replace(
        base,
        hf_names=tuple(f"{name}.{UP}.weight" for name in modules),
        mf_name=f"{_stem(base)}.{UP}",
        shape=lambda dims: tuple((rows, rank) for rows, _ in base.shape(dims)),
        shard_axis=0 if base.shard_axis == 0 else None,
        keeps_whole=True,
        keeps_float32=True,
    )
    return Adapter(base, down, up)


def _stem(base: ParameterRule) -> str:
    """The beginning of the names of the factors: `...linear_qkv` of `...linear_qkv.weight`."""
    return base.mf_name.removesuffix(".weight")
