"""Parameters and optimiser state of every rank, exact to the byte: sums over the parameter layouts."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mindrlhf.algorithms.optimizers import OPTIMIZERS
from mindrlhf.layout.parameter import ParameterLayout, gathered_ranks
from mindrlhf.specs import Matrices, ModelDims, ModelSpec, ParameterRule
from mindrlhf.specs.lora import LoraOptions, adapters
from mindrlhf.specs.rules import VISION_PREFIX

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Optimisers keep their state in float32, whatever the parameters are; so are our sums of gradients.
MOMENT_BYTES = 4
GRADIENT_SUM_BYTES = 4
# Low-rank factors are float32 too.
ADAPTER_BYTES = 4


@dataclass(frozen=True)
class StageState:
    """State of each rank of one pipeline stage between steps, in bytes unless named otherwise.

    Attributes:
        num_elements: elements of its parameter shards, optimiser sharding included.
        num_gathered_elements: elements of the same shards before optimiser sharding, as the layers use them.
        largest_gathered_elements: those of the largest parameter.
        largest_gradient_elements: those of the largest that is trained.
        largest_elements: elements of the largest shard that is trained, after optimiser sharding.
        parameters: shards in the parameters' dtype, without adapters.
        moments: the optimiser's state of those shards, float32.
        gradient_sums: gradients of those shards, float32, added up over the micro-batches of an update.
        accumulators: gradients added up over pipeline micro-batches, where there are several. They are of the
            trained parameters' dtype, and of the shards before optimiser sharding: MindSpore clones them for it.
        adapters: low-rank factors, float32; where there are any, only they are trained.
        gathered_matrices: elements of the whole blocks of hidden matrices that the optimiser's step gathers.
        largest_gathered_matrices: those of one parameter.
    """

    num_elements: int
    num_gathered_elements: int
    largest_gathered_elements: int
    largest_gradient_elements: int
    largest_elements: int
    parameters: int
    moments: int
    gradient_sums: int
    accumulators: int
    adapters: int = 0
    gathered_matrices: int = 0
    largest_gathered_matrices: int = 0

    @property
    def total(self) -> int:
        """Bytes of the whole state."""
        return self.parameters + self.adapters + self.moments + self.gradient_sums + self.accumulators


@dataclass(frozen=True)
class ParameterRow:
    """Parameters that are alike but for their layer, as one line of the table.

    Attributes:
        name: MindFormers name, `*` for the layer.
        num_tensors: how many there are in the model.
        shape: of the whole parameter.
        shard_shape: of one rank's shard.
        stages: pipeline stages that hold them, first and last.
        split: in words, how it is sharded.
        state_bytes: parameter and moments of one shard.
    """

    name: str
    num_tensors: int
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    stages: tuple[int, int]
    split: str
    state_bytes: int


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimiser for the trained parameters.

    Attributes:
        optimizer: value of `optimizer.type`.
        matrices: how parameters are put together of hidden matrices, by name.
    """

    optimizer: str
    matrices: Mapping[str, Matrices | None]

    def element_bytes(self, name: str) -> int:
        """Bytes of optimiser state for each element of a parameter."""
        return MOMENT_BYTES * len(OPTIMIZERS[self.optimizer].state_of(self.matrices.get(name) is not None))

    def gathered_elements(self, layout: ParameterLayout) -> int:
        """Elements of a parameter that a rank gathers in the optimiser's step."""
        matrices, optimizer = self.matrices.get(layout.name), OPTIMIZERS[self.optimizer]
        if matrices is None or optimizer.matrix_state == optimizer.other_state:
            return 0
        ranks, _ = gathered_ranks(layout, 0, matrices.block_rows)
        return len(ranks) * math.prod(layout.shard_shape)


class KnownRules:
    """A spec whose rules are spelled out once: those of a large mixture of experts hold 45,000 names.

    Args:
        lora: stands for the factors of these adapters instead.
    """

    def __init__(self, spec: ModelSpec, dims: ModelDims, lora: LoraOptions | None = None):
        self._rules = spec.rules(dims)
        self.is_scorer = spec.is_scorer
        if lora is not None:
            self._rules = [rule for adapter in adapters(spec, dims, lora) for rule in (adapter.down, adapter.up)]

    def rules(self, _: ModelDims) -> list[ParameterRule]:
        """Return the rules of the model that this was made for."""
        return self._rules


def count_parameters(layouts: Sequence[ParameterLayout]) -> int:
    """Return the number of elements of the whole model; a tied embedding counts once."""
    return sum(math.prod(layout.shape) for layout in layouts)


def active_parameters(spec: ModelSpec | KnownRules, dims: ModelDims) -> int:
    """Return the parameters that one token meets: of the routed experts, those it is sent to; no vision tower."""
    total = 0
    for rule in spec.rules(dims):
        if rule.mf_name.startswith(VISION_PREFIX):
            continue
        elements = math.prod(rule.mf_shape(dims))
        total += elements if rule.expert_axis is None else elements * dims.experts.num_active // dims.num_experts
    return total


def untrained_names(spec: ModelSpec | KnownRules, dims: ModelDims) -> dict[str, bool]:
    """Return the parameters that gradients do not change: name -> whether it is float32 whatever the others are."""
    return {rule.mf_name: rule.keeps_float32 for rule in spec.rules(dims) if not rule.trained}


def _untrained_bytes(keeps_float32: bool, param_dtype: str) -> int:
    return ELEMENT_BYTES["float32" if keeps_float32 else param_dtype]


def stage_states(
    layouts: Sequence[ParameterLayout],
    num_stages: int,
    param_dtype: str,
    untrained: Mapping[str, bool] | None = None,
    accumulates: bool = False,
    adapters: Sequence[ParameterLayout] = (),
    optimizer: "OptimizerState | None" = None,
) -> list[StageState]:
    """Return the state of a rank, by pipeline stage; all ranks of a stage hold shards of the same shapes.

    Args:
        untrained: parameters without moments and gradients; see :func:`untrained_names`.
        accumulates: micro-batches are split into pipeline micro-batches.
        adapters: low-rank factors, which are trained in the place of ``layouts``.
        optimizer: AdamW's without it.
    """
    states, untrained, optimizer = [], untrained or {}, optimizer or OptimizerState("adamw", {})
    for stage in range(num_stages):
        held = [layout for layout in layouts if stage in layout.stages]
        weights = [layout for layout in held if layout.name not in untrained]
        fixed = [layout for layout in held if layout.name in untrained]
        factors = [layout for layout in adapters if stage in layout.stages]
        trained, trained_bytes = (factors, ADAPTER_BYTES) if adapters else (weights, ELEMENT_BYTES[param_dtype])
        fixed_elements = sum(math.prod(layout.shard_shape) for layout in fixed)
        fixed_bytes = sum(
            math.prod(layout.shard_shape) * _untrained_bytes(untrained[layout.name], param_dtype) for layout in fixed
        )
        elements, factor_elements, trained_elements = map(_shard_elements, (weights, factors, trained))
        gathered = [gathered_elements(layout) for layout in weights]
        gradients = [gathered_elements(layout) for layout in trained]
        matrices = [optimizer.gathered_elements(layout) for layout in trained]
        states.append(
            StageState(
                num_elements=elements + fixed_elements + factor_elements,
                num_gathered_elements=sum(gathered) + fixed_elements,
                largest_gathered_elements=max(gathered),
                largest_gradient_elements=max(gradients),
                largest_elements=max(math.prod(layout.shard_shape) for layout in trained),
                parameters=elements * ELEMENT_BYTES[param_dtype] + fixed_bytes,
                moments=sum(math.prod(layout.shard_shape) * optimizer.element_bytes(layout.name) for layout in trained),
                gradient_sums=trained_elements * GRADIENT_SUM_BYTES,
                accumulators=sum(gradients) * trained_bytes if accumulates else 0,
                adapters=factor_elements * ADAPTER_BYTES,
                gathered_matrices=sum(matrices),
                largest_gathered_matrices=max(matrices),
            )
        )
    return states


def _shard_elements(layouts: Sequence[ParameterLayout]) -> int:
    return sum(math.prod(layout.shard_shape) for layout in layouts)


def gathered_elements(layout: ParameterLayout) -> int:
    """Return the elements of a rank's shard before optimiser sharding."""
    return math.prod(layout.shard_shape) * layout.optimizer_shard_size


def parameter_rows(
    layouts: Sequence[ParameterLayout],
    param_dtype: str,
    untrained: Mapping[str, bool] | None = None,
    adapters: Sequence[ParameterLayout] = (),
    optimizer: "OptimizerState | None" = None,
) -> list[ParameterRow]:
    """Return the table of parameters, in the order of the forward pass, and of the adapters that alone are trained."""
    untrained, optimizer = untrained or {}, optimizer or OptimizerState("adamw", {})

    def element_bytes(name: str) -> int:
        if name in untrained:
            return _untrained_bytes(untrained[name], param_dtype)
        return ELEMENT_BYTES[param_dtype] + (0 if adapters else optimizer.element_bytes(name))

    return _rows(layouts, element_bytes) + _rows(adapters, lambda name: ADAPTER_BYTES + optimizer.element_bytes(name))


def _rows(layouts: Sequence[ParameterLayout], element_bytes: Callable[[str], int]) -> list[ParameterRow]:
    alike: dict[tuple, list[ParameterLayout]] = {}
    for layout in layouts:
        name = re.sub(r"\.(layers|blocks)\.\d+\.", r".\1.*.", layout.name)
        alike.setdefault((name, layout.shape, layout.shard_shape), []).append(layout)
    rows = []
    for (name, shape, shard_shape), members in alike.items():
        stages = [stage for layout in members for stage in layout.stages]
        rows.append(
            ParameterRow(
                name=name,
                num_tensors=len(members),
                shape=shape,
                shard_shape=shard_shape,
                stages=(min(stages), max(stages)),
                split=split_words(members[0]),
                state_bytes=math.prod(shard_shape) * element_bytes(members[0].name),
            )
        )
    return rows


def split_words(layout: ParameterLayout) -> str:
    """Return how a parameter is sharded: "axis 0 / 4", "whole", with "/ 2 opt" for the optimiser shard."""
    cuts = [f"axis {axis} / {parts}" for axis, parts in enumerate(layout.splits) if parts > 1]
    words = ", ".join(cuts) or "whole"
    if layout.optimizer_shard_size > 1:
        words += f"; opt / {layout.optimizer_shard_size}"
    return words
