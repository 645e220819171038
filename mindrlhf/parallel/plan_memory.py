"""Device memory of one rank of each pipeline stage, in each phase of the loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.models.spec import ModelDims
from mindrlhf.parallel import plan_activations as activations
from mindrlhf.parallel.layout import Layout
from mindrlhf.parallel.plan_batch import BatchPlan
from mindrlhf.parallel.plan_parameters import ELEMENT_BYTES, StageState
from mindrlhf.parallel.plan_rollout import RolloutPlan

ROLLOUT, OLD_LOGPROBS, UPDATE, TRANSFER = "rollout", "old log-probs", "update", "weight transfer"
# CANN's context, operator binaries and streams of the trainer and of the generator, asleep or not.
_CONTEXT_BYTES = 2_500_000_000
# HCCL keeps two buffers of HCCL_BUFFSIZE (200 MB unless set) per communicator.
_COMMUNICATOR_BYTES = 2 * 200_000_000


@dataclass(frozen=True)
class MemoryItem:
    """One part of the memory; ``exact`` tells that it follows from the layout, not from an estimate."""

    name: str
    size_bytes: int
    exact: bool


@dataclass(frozen=True)
class PhaseMemory:
    """What a rank of pipeline stage ``stage`` has in memory in one phase of the loop."""

    phase: str
    stage: int
    items: tuple[MemoryItem, ...]

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(item.size_bytes for item in self.items)


@dataclass(frozen=True)
class MemoryInputs:
    """What the estimate needs.

    Attributes:
        widths: of every decoder layer, in order.
        layer_stages: pipeline stage of every decoder layer.
        states: by pipeline stage.
        num_communicators: communication groups that a rank is in.
    """

    config: GrpoConfig
    layout: Layout
    dims: ModelDims
    widths: Sequence[activations.LayerWidths]
    layer_stages: Sequence[int]
    states: Sequence[StageState]
    batch: BatchPlan
    rollout: RolloutPlan
    num_communicators: int

    @property
    def element_bytes(self) -> int:
        """Of the compute dtype."""
        return ELEMENT_BYTES[self.config.model.compute_dtype]

    @property
    def num_tokens(self) -> int:
        """Positions that a rank computes at a time: one piece of the pipeline, or one micro-batch."""
        return self.batch.rows_per_piece * self.batch.row_length // self.layout.context_parallel

    def stage_widths(self, stage: int) -> list[activations.LayerWidths]:
        """Widths of the layers of a pipeline stage."""
        return [widths for widths, place in zip(self.widths, self.layer_stages) if place == stage]


def plan_memory(inputs: MemoryInputs) -> list[PhaseMemory]:
    """Return the memory of every phase that the run has, for every pipeline stage."""
    config, memory = inputs.config, []
    needs_forward = config.algorithm.beta > 0 or inputs.batch.num_updates > 1
    for stage, state in enumerate(inputs.states):
        resident = _resident(inputs, state)
        memory.append(_phase(ROLLOUT, stage, resident, _rollout_items(inputs.rollout)))
        if needs_forward:
            memory.append(_phase(OLD_LOGPROBS, stage, resident, _forward_items(inputs, stage)))
        memory.append(_phase(UPDATE, stage, resident, _update_items(inputs, stage)))
        transfer = [MemoryItem("rollout weights", inputs.rollout.weights, False)]
        memory.append(_phase(TRANSFER, stage, resident, transfer))
    return memory


def activation_bytes(inputs: MemoryInputs, stage: int) -> tuple[int, int]:
    """Return what a stage keeps for the backward pass: with recomputation and without it.

    Under 1F1B a stage has at most as many pieces in flight as there are stages from it to the last
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
    """
    in_flight = min(inputs.batch.num_pieces, inputs.layout.pipeline_stage - stage)
    arguments = (inputs.layout, inputs.num_tokens, inputs.element_bytes)
    layers = inputs.stage_widths(stage)
    kept = sum(activations.checkpoint_bytes(widths, *arguments) for widths in layers)
    whole = sum(activations.layer_bytes(widths, *arguments) for widths in layers)
    return in_flight * kept, in_flight * whole


def _phase(name: str, stage: int, resident: list[MemoryItem], items: list[MemoryItem]) -> PhaseMemory:
    return PhaseMemory(name, stage, tuple(item for item in (*resident, *items) if item.size_bytes))


def _resident(inputs: MemoryInputs, state: StageState) -> list[MemoryItem]:
    """What the trainer keeps on the device in every phase."""
    model = inputs.config.model
    reference = state.num_gathered_elements * ELEMENT_BYTES[model.param_dtype]
    return [
        MemoryItem("parameters", state.parameters, True),
        MemoryItem("AdamW moments", state.moments, True),
        MemoryItem("gradient accumulators", state.accumulators, True),
        MemoryItem("reference model", reference if inputs.config.algorithm.beta > 0 else 0, True),
        MemoryItem("runtime and HCCL", _CONTEXT_BYTES + inputs.num_communicators * _COMMUNICATOR_BYTES, False),
    ]


def _rollout_items(rollout: RolloutPlan) -> list[MemoryItem]:
    return [
        MemoryItem("rollout weights", rollout.weights, False),
        MemoryItem("rollout workspace", rollout.workspace, False),
        MemoryItem("KV cache", max(0, rollout.kv_cache), False),
    ]


def _forward_items(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    return [
        MemoryItem("weights in compute dtype", _copied_weights(inputs, stage, keeps_all=False), False),
        MemoryItem("one layer's activations", _largest_layer(inputs, stage), False),
        MemoryItem("logits", _logits(inputs, stage), False),
        MemoryItem("attention mask", _mask(inputs), False),
    ]


def _update_items(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    recompute, state = inputs.config.model.recompute, inputs.states[stage]
    kept, whole = activation_bytes(inputs, stage)
    # Gathered weights are kept from the forward to the backward pass; casts are computed anew with their layer.
    keeps_all = inputs.layout.optimizer_shard != 1 or not recompute
    return [
        MemoryItem("weights in compute dtype", _copied_weights(inputs, stage, keeps_all), False),
        MemoryItem("activations" + (" (recomputed)" if recompute else ""), kept if recompute else whole, False),
        # Values and gradients of the layer that is at work.
        MemoryItem("one layer's work", (2 if recompute else 1) * _largest_layer(inputs, stage), False),
        MemoryItem("largest gradient", state.largest_gathered_elements * 4, False),
        MemoryItem("logits", _logits(inputs, stage), False),
        MemoryItem("attention mask", _mask(inputs), False),
    ]


def _copied_weights(inputs: MemoryInputs, stage: int, keeps_all: bool) -> int:
    """Weights as the matrix products read them: cast, and gathered if the optimiser shard has cut them."""
    model, state = inputs.config.model, inputs.states[stage]
    if model.param_dtype == model.compute_dtype and inputs.layout.optimizer_shard == 1:
        return 0
    share = 1 if keeps_all else 1 / max(1, len(inputs.stage_widths(stage)))
    elements = max(state.largest_gathered_elements, state.num_gathered_elements * share)
    return round(elements * inputs.element_bytes)


def _largest_layer(inputs: MemoryInputs, stage: int) -> int:
    arguments = (inputs.layout, inputs.num_tokens, inputs.element_bytes)
    return max(activations.layer_bytes(widths, *arguments) for widths in inputs.stage_widths(stage))


def _logits(inputs: MemoryInputs, stage: int) -> int:
    if stage != inputs.layout.pipeline_stage - 1:
        return 0
    return activations.logit_bytes(inputs.dims, inputs.layout, inputs.num_tokens, inputs.element_bytes)


def _mask(inputs: MemoryInputs) -> int:
    """The [rows, 1, length, length] mask of packed rows: one byte, and the comparison it is made from."""
    return 2 * inputs.batch.rows_per_piece * inputs.batch.row_length**2 // inputs.layout.context_parallel
