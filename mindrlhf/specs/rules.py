"""Correspondence of MindFormers parameters and Hugging Face tensors, and the rules that several architectures share."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mindrlhf.specs.dims import ModelDims

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Matrices:
    """Composition of a MindFormers parameter [rows, columns] of matrices that each multiply a token.

    It is ``count`` equal blocks of rows, one after the other. In a block matrices take turns, with as many of their
    rows at a time as ``turns`` says, over and over; or ``side_by_side`` of them lie beside each other.
    """

    rows: int
    columns: int
    count: int = 1
    turns: tuple[int, ...] = (1,)
    side_by_side: int = 1

    @property
    def block_rows(self) -> int:
        return self.rows // self.count

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the matrices of a block."""
        heights = [self.block_rows // sum(self.turns) * turn for turn in self.turns]
        return [(height, self.columns // self.side_by_side) for height in heights for _ in range(self.side_by_side)]


@dataclass(frozen=True)
class ParameterRule:
    """Correspondence of one MindFormers parameter to one or more Hugging Face tensors.

    Attributes:
        hf_names: Hugging Face names; `{layer}` stands for the layer index, `{expert}` for the index of an expert: such
            names are repeated expert by expert.
        mf_name: MindFormers (mcore) name.
        transform: `copy`, `qkv` (per group: r query heads, one key head, one value head), `gate_up` (rows alternate),
            `halves` (rows alternate that are two halves of one tensor),
            `delta` (per key head of linear attention: its query, key and values, which one tensor has one after the
            other),
            `expert_gate_up` (per expert `[gate^T | up^T]`, stacked), `expert_down` (per expert `down^T`, stacked) or
            `stack` (equal parts, one after the other).
        shape: Hugging Face shapes, in the order of `hf_names`; of one expert where these name `{expert}`.
        shard_axis: the axis that tensor parallelism splits, the same in both layouts; None when replicated.
        present: whether a model of these dimensions has the parameter.
        expert_axis: the axis of the MindFormers parameter that expert parallelism splits; None when it does not.
        in_layer: whether this decoder layer has the parameter.
        trained: gradients change it.
        keeps_whole: a sharded optimiser leaves it, and its state if it has any, whole on each replica.
        keeps_float32: it stays float32 in files of a narrower dtype, as Hugging Face keeps it.
        is_hidden_matrix: a matrix between hidden states: it may have an adapter, and Muon makes its updates orthogonal.
        num_experts: how often the tensors of one expert are repeated in `hf_names`; filled in by `for_layer`.
    """

    hf_names: tuple[str, ...]
    mf_name: str
    transform: str
    shape: Callable[[ModelDims], Shapes]
    shard_axis: int | None
    present: Callable[[ModelDims], bool] = lambda dims: True
    expert_axis: int | None = None
    in_layer: Callable[[ModelDims, int], bool] = lambda dims, layer: True
    trained: bool = True
    keeps_whole: bool = False
    keeps_float32: bool = False
    is_hidden_matrix: bool = True
    num_experts: int = 1

    def for_layer(self, layer: int, dims: ModelDims) -> "ParameterRule":
        """Return the rule with `{layer}` and `{expert}` filled in."""
        is_stacked = "{expert}" in self.hf_names[0]
        num_experts = dims.num_experts if is_stacked else 1
        one_expert = self.shape
        return replace(
            self,
            hf_names=tuple(
                name.format(layer=layer, expert=expert) for expert in range(num_experts) for name in self.hf_names
            ),
            mf_name=self.mf_name.format(layer=layer),
            shape=(lambda dims: one_expert(dims) * num_experts) if is_stacked else one_expert,
            num_experts=num_experts,
        )

    def mf_shape(self, dims: ModelDims) -> tuple[int, ...]:
        """Shape of the MindFormers parameter: parts are stacked along their first axis, experts transposed before."""
        shapes = self.shape(dims)
        if self.transform.startswith("expert"):
            widths = [rows for rows, _ in shapes[: len(shapes) // self.num_experts]]
            return (self.num_experts * shapes[0][1], sum(widths))
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def matrices(self, dims: ModelDims) -> Matrices | None:
        """The hidden matrices in the MindFormers parameter, those of decoder layers; None where it has none."""
        shape = self.mf_shape(dims)
        if not self.mf_name.startswith(LAYERS) or len(shape) != 2 or not self.is_hidden_matrix:
            return None
        if self.transform == "qkv":
            return Matrices(*shape, turns=(dims.query_rows, dims.head_dim, dims.head_dim))
        if self.transform == "delta":
            return Matrices(*shape, turns=dims.linear.group_rows)
        options = {
            "gate_up": {"turns": (1, 1)},
            "halves": {"turns": (1, 1)},
            "stack": {"count": len(self.hf_names)},
            "expert_gate_up": {"count": self.num_experts, "side_by_side": 2},
            "expert_down": {"count": self.num_experts},
        }
        return Matrices(*shape, **options.get(self.transform, {}))


# Names of a vision tower, in checkpoints and here.
VISION_PREFIX = "visual."
# What a sharded graph looks image rows up in: a parameter that is no weight.
IMAGE_ROWS_NAME = "image_rows"
LAYER = "model.layers.{layer}."
LAYERS = "decoder.layers."
BLOCK = f"{LAYERS}{{layer}}."


def norm(hf_name: str, mf_name: str, size: Callable[[ModelDims], int], **options) -> ParameterRule:
    """The weight of an RMSNorm: replicated."""
    return ParameterRule((hf_name,), mf_name, "copy", lambda dims: ((size(dims),),), shard_axis=None, **options)


def gated_mlp(
    hf_name: str, mf_name: str, size: Callable[[ModelDims], int], *, is_sharded: bool = True, **options
) -> tuple[ParameterRule, ParameterRule]:
    """The two parameters of a gated MLP of a width; tensor parallelism splits its channels when ``is_sharded``."""
    return (
        ParameterRule(
            (f"{hf_name}.gate_proj.weight", f"{hf_name}.up_proj.weight"),
            f"{mf_name}.linear_fc1.weight",
            "gate_up",
            lambda dims: ((size(dims), dims.hidden_size),) * 2,
            shard_axis=0 if is_sharded else None,
            **options,
        ),
        ParameterRule(
            (f"{hf_name}.down_proj.weight",),
            f"{mf_name}.linear_fc2.weight",
            "copy",
            lambda dims: ((dims.hidden_size, size(dims)),),
            shard_axis=1 if is_sharded else None,
            **options,
        ),
    )


def _has_experts(dims: ModelDims, layer: int) -> bool:
    return dims.has_experts(layer)


def _is_dense(dims: ModelDims, layer: int) -> bool:
    return not dims.has_experts(layer)


EMBEDDING = ParameterRule(
    ("model.embed_tokens.weight",),
    "embedding.word_embeddings.weight",
    "copy",
    lambda dims: ((dims.vocab_size, dims.hidden_size),),
    shard_axis=0,
)
FINAL_NORM = norm("model.norm.weight", "decoder.final_layernorm.weight", lambda dims: dims.hidden_size)
OUTPUT = ParameterRule(
    ("lm_head.weight",),
    "output_layer.weight",
    "copy",
    lambda dims: ((dims.vocab_size, dims.hidden_size),),
    shard_axis=0,
    present=lambda dims: not dims.tied,
)
INPUT_NORM = norm(f"{LAYER}input_layernorm.weight", f"{BLOCK}input_layernorm.weight", lambda dims: dims.hidden_size)
MLP_NORM = norm(
    f"{LAYER}post_attention_layernorm.weight", f"{BLOCK}pre_mlp_layernorm.weight", lambda dims: dims.hidden_size
)


def norms_of_outputs(after_attention: str, after_mlp: str) -> tuple[ParameterRule, ParameterRule]:
    """The weights of the norms of what attention and MLP add, by their names in a layer of a checkpoint."""
    return tuple(
        norm(f"{LAYER}{hf_name}.weight", f"{BLOCK}post_{part}_layernorm.weight", lambda dims: dims.hidden_size)
        for hf_name, part in ((after_attention, "attention"), (after_mlp, "mlp"))
    )


MLP = gated_mlp(f"{LAYER}mlp", f"{BLOCK}mlp", lambda dims: dims.intermediate_size, in_layer=_is_dense)
ROUTER = ParameterRule(
    (f"{LAYER}mlp.gate.weight",),
    f"{BLOCK}mlp.router.weight",
    "copy",
    lambda dims: ((dims.num_experts, dims.hidden_size),),
    shard_axis=None,
    in_layer=_has_experts,
)
SELECTION_BIAS = ParameterRule(
    (f"{LAYER}mlp.gate.e_score_correction_bias",),
    f"{BLOCK}mlp.router.expert_bias",
    "copy",
    lambda dims: ((dims.num_experts,),),
    shard_axis=None,
    in_layer=_has_experts,
    trained=False,
    keeps_whole=True,
    keeps_float32=True,
)
EXPERTS = (
    ParameterRule(
        (f"{LAYER}mlp.experts.{{expert}}.gate_proj.weight", f"{LAYER}mlp.experts.{{expert}}.up_proj.weight"),
        f"{BLOCK}mlp.experts.weight1",
        "expert_gate_up",
        lambda dims: ((dims.experts.intermediate_size, dims.hidden_size),) * 2,
        shard_axis=None,
        expert_axis=0,
        in_layer=_has_experts,
    ),
    ParameterRule(
        (f"{LAYER}mlp.experts.{{expert}}.down_proj.weight",),
        f"{BLOCK}mlp.experts.weight2",
        "expert_down",
        lambda dims: ((dims.hidden_size, dims.experts.intermediate_size),),
        shard_axis=None,
        expert_axis=0,
        in_layer=_has_experts,
    ),
)
# MindFormers computes the shared expert on the tokens of each rank: its weights are whole everywhere.
SHARED_EXPERT = gated_mlp(
    f"{LAYER}mlp.shared_experts",
    f"{BLOCK}mlp.shared_experts",
    lambda dims: dims.experts.shared_size,
    is_sharded=False,
    in_layer=_has_experts,
    present=lambda dims: dims.experts is not None and dims.experts.shared_size > 0,
)
