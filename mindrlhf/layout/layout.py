"""Shards of every parameter on every rank, in plain Python.

Terms are MindSpore's. The ranks of one pipeline stage form a *device matrix*, last axis innermost; a *tensor map* says
for each axis of a tensor which axis of the matrix splits it, counted from the right (0 is the last), -1 for none. What
the matrix does not split is repeated, and the optimiser-parallel shard splits axis 0 of such repeated shards once more
(ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054), unless the parameter is small or the shard does not divide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from mindrlhf.config.training import ParallelSection, resolve_data_parallel
from mindrlhf.errors import UserError
from mindrlhf.layout.parameter import ParameterLayout, mixed_radix
from mindrlhf.specs.rules import VISION_PREFIX

if TYPE_CHECKING:
    from mindrlhf.specs import ModelDims, ModelSpec, ParameterRule

# MindSpore's default `parallel_optimizer_threshold`: a parameter that is smaller, as a whole, is not sharded.
OPTIMIZER_THRESHOLD_BYTES = 64 * 1024
_EMBEDDING = "embedding.word_embeddings.weight"
_SHORT_NAMES = {
    "dp": "data_parallel",
    "mp": "model_parallel",
    "pp": "pipeline_stage",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "sp": "use_seq_parallel",
    "opt": "optimizer_shard",
    "vocab_emb_dp": "vocab_emb_dp",
}


class Coordinates(NamedTuple):
    """Place of a rank: its pipeline stage and its index along each axis of the stage's device matrix."""

    stage: int
    data: int
    context: int
    model: int


@dataclass(frozen=True)
class Layout:
    """Sharding of a model over ranks. Ranks count stage by stage; in a stage data, context, model (innermost).

    Attributes:
        data_parallel: replicas of the model.
        model_parallel: ranks that share each weight matrix.
        pipeline_stage: stages that the layers are split into.
        context_parallel: ranks that share each sequence.
        expert_parallel: ranks that share the experts, out of data * context * model.
        use_seq_parallel: activations of norms are split along the sequence; no parameter is.
        vocab_emb_dp: the embedding is whole on each rank of its stage; an output layer tied to it keeps it split.
        optimizer_shard: ranks that share one repeated shard and its optimiser state; 1 none, -1 all that repeat it.
    """

    data_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    use_seq_parallel: bool = False
    vocab_emb_dp: bool = False
    optimizer_shard: int = 1

    def __post_init__(self):
        for short, name in _SHORT_NAMES.items():
            value = getattr(self, name)
            if name == "optimizer_shard":
                if value == 0 or value < -1:
                    raise UserError(f"optimizer_shard is {value}: give -1 (all replicas), 1 (none) or a group size")
            elif not isinstance(value, bool) and value < 1:
                raise UserError(f"{short} ({name}) is {value}: give 1 or more")
        if self.stage_size % self.expert_parallel:
            raise UserError(
                f"expert_parallel is {self.expert_parallel}, which does not divide the {self.stage_size} ranks of a "
                f"stage: set it to a divisor of {self.stage_size}"
            )

    @classmethod
    def from_config(cls, parallel: ParallelSection, world_size: int) -> "Layout":
        """The layout of a run's `parallel_config`.

        Raises:
            UserError: it does not use exactly ``world_size`` ranks.
        """
        shard = -1 if parallel.enable_parallel_optimizer else 1
        return cls(
            data_parallel=resolve_data_parallel(parallel, world_size),
            model_parallel=parallel.model_parallel,
            pipeline_stage=parallel.pipeline_stage,
            context_parallel=parallel.context_parallel,
            expert_parallel=parallel.expert_parallel,
            use_seq_parallel=parallel.use_seq_parallel,
            vocab_emb_dp=parallel.vocab_emb_dp,
            optimizer_shard=shard,
        )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read `dp=2,mp=2,pp=2,cp=1,ep=1,opt=1`; `opt` is 0 for none, 1 for all replicas, N for groups of N.

        Raises:
            UserError: an unknown name or a value that is no number in range.
        """
        values: dict[str, int | bool] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            short, _, number = (part.strip() for part in item.partition("="))
            if short not in _SHORT_NAMES:
                raise UserError(f"--parallel has {item!r}: use NAME=NUMBER with names {', '.join(_SHORT_NAMES)}")
            name = _SHORT_NAMES[short]
            if name in values:
                raise UserError(f"--parallel gives {short!r} twice: give it once")
            try:
                value = int(number)
            except ValueError:
                raise UserError(f"--parallel has {item!r}: give a whole number after '='") from None
            if isinstance(getattr(cls, name), bool):
                if value not in (0, 1):
                    raise UserError(f"--parallel has {item!r}: give {short}=0 or {short}=1")
                values[name] = bool(value)
            elif short == "opt":
                values[name] = {0: 1, 1: -1}.get(value, value)
            else:
                values[name] = value
        return cls(**values)

    def __str__(self) -> str:
        """The short form that `parse` reads, without values that are defaults (dp, mp and pp always stand)."""
        words = []
        for short, name in _SHORT_NAMES.items():
            value = getattr(self, name)
            if short in ("dp", "mp", "pp") or value != getattr(Layout, name):
                words.append(f"{short}={1 if short == 'opt' and value == -1 else int(value)}")
        return ",".join(words)

    def to_dict(self) -> dict[str, int | bool]:
        """The attributes as JSON-able values; `Layout(**...)` makes it again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data_parallel * self.context_parallel * self.model_parallel

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline_stage

    @property
    def device_matrix(self) -> tuple[int, int, int]:
        """Data, context and model axes of a stage."""
        return self.data_parallel, self.context_parallel, self.model_parallel

    def stage_of(self, rank: int) -> int:
        assert 0 <= rank < self.world_size, f"rank {rank} is outside the {self.world_size} ranks"
        return rank // self.stage_size

    def coordinates(self, rank: int) -> Coordinates:
        return Coordinates(self.stage_of(rank), *mixed_radix(rank % self.stage_size, self.device_matrix))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The ranks that differ along one axis only: `data`, `context`, `model`, `stage` or `expert`."""
        if axis == "expert":
            size = self.expert_parallel
            return [tuple(range(start, start + size)) for start in range(0, self.world_size, size)]
        members: dict[Coordinates, list[int]] = {}
        for rank in range(self.world_size):
            members.setdefault(self.coordinates(rank)._replace(**{axis: 0}), []).append(rank)
        return [tuple(ranks) for ranks in members.values()]

    def layer_offsets(self, num_layers: int) -> tuple[int, ...]:
        """Layers that each stage has beyond num_layers // pipeline_stage: MindFormers' `offset`.

        The remainder goes to the stages before the last, which has the output layer, counted from the back: early
        stages keep more micro-batches in memory.

        Raises:
            UserError: fewer layers than stages.
        """
        if num_layers < self.pipeline_stage:
            raise UserError(
                f"pipeline_stage is {self.pipeline_stage}, but the model has {num_layers} layers: set it to "
                f"{num_layers} or less"
            )
        remainder = num_layers % self.pipeline_stage
        takes = range(self.pipeline_stage - 1 - remainder, self.pipeline_stage - 1)
        return tuple(int(stage in takes) for stage in range(self.pipeline_stage))

    def layer_stages(self, num_layers: int) -> tuple[int, ...]:
        """Pipeline stage of each decoder layer (MindFormers' `LayerSetting`, without interleaving)."""
        base = num_layers // self.pipeline_stage
        return tuple(stage for stage, extra in enumerate(self.layer_offsets(num_layers)) for _ in range(base + extra))


def parameter_layouts(
    spec: "ModelSpec", dims: "ModelDims", layout: Layout, element_bytes: int = 4
) -> list[ParameterLayout]:
    """The layout of every parameter of a model, in the order of the forward pass.

    Vision tower and embedding in the first stage, final norm and output layer in the last; a tied embedding in both.
    MindSpore leaves a shard whole, although the optimiser is parallel, when the whole parameter is smaller than
    `OPTIMIZER_THRESHOLD_BYTES` or the shard's first axis does not divide by the group.

    Args:
        element_bytes: size of one element of the parameters, which decides what is small.

    Raises:
        UserError: the model cannot be sharded this way; the message names the size and what divides it.
    """
    check_divisible(dims, layout)
    stages = layout.layer_stages(dims.num_layers)
    # A model that gives scores has no output projection to tie the embedding to.
    is_tied = dims.tied and not spec.is_scorer
    layouts = []
    for rule in spec.rules(dims):
        shape = rule.mf_shape(dims)
        matrix, axis = _split(rule, layout, is_tied)
        tensor_map = tuple(0 if index == axis else -1 for index in range(len(shape)))
        if axis is not None and shape[axis] % matrix[-1]:
            raise UserError(
                f"{rule.mf_name} has {shape[axis]} rows on axis {axis}, which do not divide by {matrix[-1]} ranks: "
                "choose a smaller model_parallel or expert_parallel"
            )
        whole = ParameterLayout(rule.mf_name, shape, _stages(rule, is_tied, stages), matrix, tensor_map)
        # The optimiser knows nothing of what is not trained.
        shard = 1 if rule.keeps_whole else layout.optimizer_shard
        layouts.append(_with_optimizer_shard(whole, shard, element_bytes))
    return layouts


def check_divisible(dims: "ModelDims", layout: Layout) -> None:
    """Check that every size that is split divides.

    Raises:
        UserError: naming the size, the split and the values that would do.
    """
    parts = layout.model_parallel
    sizes = {
        "query heads": dims.num_heads,
        "key/value heads": dims.num_kv_heads,
        **({"key heads of linear attention": dims.linear.key_heads} if dims.linear else {}),
        "MLP channels": dims.intermediate_size,
        "vocabulary rows": dims.vocab_size,
    }
    choices = [n for n in range(1, dims.num_kv_heads + 1) if all(size % n == 0 for size in sizes.values())]
    for what, size in sizes.items():
        if size % parts:
            raise UserError(
                f"model_parallel is {parts}, but the model has {size} {what}: set it to one of "
                f"{', '.join(map(str, choices))}"
            )
    num_experts = dims.num_experts
    if layout.expert_parallel > 1 and not num_experts:
        raise UserError(f"expert_parallel is {layout.expert_parallel}, but the model has no experts: set it to 1")
    if num_experts % layout.expert_parallel:
        raise UserError(
            f"expert_parallel is {layout.expert_parallel}, but the model has {num_experts} experts: set it to a "
            f"divisor of {num_experts}"
        )
    layout.layer_offsets(dims.num_layers)


def _split(rule: "ParameterRule", layout: Layout, is_tied: bool) -> tuple[tuple[int, ...], int | None]:
    """The device matrix of a parameter, and the axis that the matrix' last axis splits."""
    if rule.expert_axis is not None:
        # MindFormers' experts know two axes only, and split over the innermost ranks.
        return (layout.stage_size // layout.expert_parallel, layout.expert_parallel), rule.expert_axis
    if rule.mf_name == _EMBEDDING and layout.vocab_emb_dp and not is_tied:
        return layout.device_matrix, None
    return layout.device_matrix, rule.shard_axis


def _stages(rule: "ParameterRule", is_tied: bool, layer_stages: Sequence[int]) -> tuple[int, ...]:
    first, last = layer_stages[0], layer_stages[-1]
    if rule.mf_name == _EMBEDDING:
        return (first, last) if is_tied and first != last else (first,)
    if rule.mf_name.startswith(VISION_PREFIX):
        return (first,)
    words = rule.mf_name.split(".")
    if words[:2] == ["decoder", "layers"]:
        return (layer_stages[int(words[2])],)
    # What is neither is behind the layers: final norm, output layer, score.
    return (last,)


def _with_optimizer_shard(whole: ParameterLayout, shard: int, element_bytes: int) -> ParameterLayout:
    repeats = whole.num_repeats
    size = repeats if shard == -1 else min(shard, repeats)
    is_small = math.prod(whole.shape) * element_bytes < OPTIMIZER_THRESHOLD_BYTES
    if size == 1 or is_small or whole.shard_shape[0] % size:
        return whole
    if repeats % size:
        raise UserError(
            f"optimizer_weight_shard_size is {size}, which does not divide the {repeats} ranks that repeat "
            f"{whole.name}: set it to a divisor of {repeats}"
        )
    return ParameterLayout(whole.name, whole.shape, whole.stages, whole.device_matrix, whole.tensor_map, size)
