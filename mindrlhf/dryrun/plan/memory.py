"""Device memory of one rank of each pipeline stage, in each phase of the loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.algorithms.optimizers import OPTIMIZERS
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import trains_sharded
from mindrlhf.dryrun.plan import activations
from mindrlhf.dryrun.plan.parameters import ELEMENT_BYTES, GRADIENT_SUM_BYTES, StageState
from mindrlhf.dryrun.plan.rollout import RolloutPlan
from mindrlhf.layout.batch import BatchPlan
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.parameter_buckets import NUM_BUCKETS
from mindrlhf.layout.rows import updates_return_outputs
from mindrlhf.layout.server_shards import FIXED_WORKSPACE_BYTES
from mindrlhf.specs import ModelDims

START, ROLLOUT, OLD_LOGPROBS, UPDATE = "start", "rollout", "old log-probs", "update"
STEP, TRANSFER = "optimizer step", "transfer"
ASLEEP = "sleeping server"
RUNTIME, GRADIENT_SUMS = "runtime and HCCL", "gradient sums"
# CANN's context, operator binaries and streams of the trainer and of the generator, asleep or not.
_CONTEXT_BYTES = 2_500_000_000
# MindSpore works a graph off level by level, so that intermediate results of the optimiser's step exist for all
# parameters of a bucket at once: gradients without what is not finite, scaled ones, new moments and weights. What its
# planner (2.9.0, level 1) keeps beside the state is up to 4.9 float32 copies.
NUM_STEP_COPIES = 5
# HCCL keeps two buffers of HCCL_BUFFSIZE (200 MB unless set) per communicator.
_COMMUNICATOR_BYTES = 2 * 200_000_000


@dataclass(frozen=True)
class MemoryItem:
    """One part of the memory.

    Attributes:
        exact: it follows from the layout, not from an estimate.
    """

    name: str
    size_bytes: int
    exact: bool = False


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of a rank of pipeline stage ``stage`` in one phase of the loop."""

    phase: str
    stage: int
    items: tuple[MemoryItem, ...]

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(item.size_bytes for item in self.items)


@dataclass(frozen=True)
class MemoryInputs:
    """Inputs of the estimate.

    Attributes:
        widths: of every decoder layer, in order.
        layer_stages: pipeline stage of every decoder layer.
        states: by pipeline stage.
        num_communicators: communication groups that a rank is in.
        reference: the same of the reference model or teacher, whose parameters alone are there.
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
    reference: "MemoryInputs | None" = None

    @property
    def moments_name(self) -> str:
        """Name of the optimiser's state in the table."""
        return f"{OPTIMIZERS[self.config.optimizer.type].title} moments"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return ELEMENT_BYTES[self.config.model.compute_dtype]

    @property
    def num_tokens(self) -> int:
        """Positions that a rank computes at a time: one micro-batch, of the pipeline if there is one."""
        return self.batch.rows_per_pipeline_micro_batch * self.batch.row_length // self.layout.context_parallel

    def stage_widths(self, stage: int) -> list[activations.LayerWidths]:
        """Widths of the layers of a pipeline stage."""
        return [self.widths[layer] for layer in self.stage_layers(stage)]

    def stage_layers(self, stage: int) -> list[int]:
        """Numbers of the layers of a pipeline stage."""
        return [layer for layer, layer_stage in enumerate(self.layer_stages) if layer_stage == stage]

    def recomputes(self, layer: int) -> bool:
        """True when all of a layer is recomputed in the backward pass."""
        return self.config.model.recompute or layer in self.config.memory.layers


def needs_logprobs(inputs: MemoryInputs) -> bool:
    """True when log-probabilities of the policy take a pass of their own; a single update returns them itself."""
    config = inputs.config
    is_apart = trains_sharded(config) and not updates_return_outputs(config.parallel_config)
    return inputs.batch.num_updates > 1 or is_apart


def plan_memory(inputs: MemoryInputs) -> list[PhaseMemory]:
    """Return the memory of every phase that the run has, for every pipeline stage."""
    config, memory, moments = inputs.config, [], inputs.moments_name
    needs_forward = config.algorithm.beta > 0 or needs_logprobs(inputs)
    asleep = _asleep(inputs)
    for stage, state in enumerate(inputs.states):
        resident = _resident(inputs, stage)
        # The servers come up before the ranks run a graph, which puts what they hold on the device; then they sleep.
        memory.append(_phase(START, stage, resident[-1:], _rollout_items(inputs)))
        away = (moments,) if config.memory.swap_moments else ()
        while_gradients = [item for item in resident if item.name not in away]
        if config.memory.offload_optimizer:
            away = (moments, GRADIENT_SUMS)
        between = [item for item in resident if item.name not in away]
        memory.append(_phase(ROLLOUT, stage, between, _rollout_items(inputs)))
        if needs_forward:
            memory.append(_phase(OLD_LOGPROBS, stage, between, [*_largest_forward(inputs, stage), asleep]))
        memory.append(_phase(UPDATE, stage, while_gradients, [*_update_items(inputs, stage), asleep]))
        memory.append(_phase(STEP, stage, resident, [_step_item(state), asleep]))
        memory.append(_phase(TRANSFER, stage, while_gradients, [_rollout_weights(inputs), asleep]))
    return memory


def _phase(name: str, stage: int, resident: list[MemoryItem], items: list[MemoryItem]) -> PhaseMemory:
    return PhaseMemory(name, stage, tuple(item for item in (*resident, *items) if item.size_bytes))


def _resident(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    """Memory that the trainer holds on the device in every phase; of its items the last is the runtime's."""
    state = inputs.states[stage]
    items = [
        MemoryItem("parameters", state.parameters, exact=True),
        MemoryItem("adapters", state.adapters, exact=True),
        MemoryItem(inputs.moments_name, state.moments, exact=True),
        MemoryItem(GRADIENT_SUMS, state.gradient_sums, exact=True),
        MemoryItem("gradient accumulators", state.accumulators, exact=True),
    ]
    if inputs.reference is not None:
        items.append(MemoryItem("reference model", inputs.reference.states[stage].parameters, exact=True))
    return [*items, MemoryItem(RUNTIME, _CONTEXT_BYTES + inputs.num_communicators * _COMMUNICATOR_BYTES)]


def _rollout_items(inputs: MemoryInputs) -> list[MemoryItem]:
    rollout = inputs.rollout
    return [
        _rollout_weights(inputs),
        MemoryItem("rollout workspace", rollout.workspace),
        MemoryItem("KV cache", max(0, rollout.kv_cache)),
    ]


def _rollout_weights(inputs: MemoryInputs) -> MemoryItem:
    return MemoryItem("rollout weights", inputs.rollout.weights)


def _asleep(inputs: MemoryInputs) -> MemoryItem:
    """Memory of a sleeping server: vLLM's sleep frees weights and cache alone, not recorded graphs, kernels,
    and HCCL's buffers where several devices make a server (its group, and the world of its workers)."""
    num_groups = 2 if inputs.config.rollout.tensor_parallel > 1 else 0
    on_device = inputs.config.run.device != "cpu"
    return MemoryItem(ASLEEP, (FIXED_WORKSPACE_BYTES + num_groups * _COMMUNICATOR_BYTES) * on_device)


def _largest_forward(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    passes = [_forward_items(model, stage) for model in (inputs, inputs.reference) if model is not None]
    return max(passes, key=lambda items: sum(item.size_bytes for item in items))


def _forward_items(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    return [
        _copied_weights(inputs, stage, keeps_all=False),
        MemoryItem("one layer's activations", _largest_layer(inputs, stage)),
        _logits(inputs, stage),
        _mask(inputs),
    ]


def _update_items(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    again = [inputs.recomputes(number) for number in inputs.stage_layers(stage)]
    # Values and gradients of the layer that is at work.
    copies = 2 if any(again) or inputs.config.memory.recompute_operators else 1
    return [
        # Gathered weights are kept from the forward to the backward pass; casts are computed anew with their layer.
        _copied_weights(inputs, stage, keeps_all=inputs.layout.optimizer_shard != 1 or not all(again)),
        _activations(inputs, stage),
        MemoryItem("one layer's work", copies * _largest_layer(inputs, stage)),
        MemoryItem("largest gradient", inputs.states[stage].largest_gradient_elements * 4),
        _logits(inputs, stage),
        _head_gradient(inputs, stage),
        _mask(inputs),
    ]


def _step_item(state: StageState) -> MemoryItem:
    """Temporaries of the optimiser: of a bucket's parameters, and matrices that it gathers for them."""
    elements = NUM_STEP_COPIES * _of_bucket(state.gradient_sums // GRADIENT_SUM_BYTES, state.largest_elements)
    elements += _of_bucket(state.gathered_matrices, state.largest_gathered_matrices)
    return MemoryItem("optimizer's work", 4 * elements)


def _of_bucket(elements: int, largest: int) -> int:
    """Return the elements of the parameters of a bucket: at most the largest and a share of the others."""
    return largest + (elements - largest) // NUM_BUCKETS


def _activations(inputs: MemoryInputs, stage: int) -> MemoryItem:
    """Activations of a stage for the backward pass.

    Under 1F1B a stage has at most as many micro-batches in flight as there are stages from it to the last
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
    """
    in_flight = min(inputs.batch.num_pipeline_micro_batches, inputs.layout.pipeline_stage - stage)
    layers = inputs.stage_layers(stage)
    again = sum(map(inputs.recomputes, layers))
    share = "" if again == len(layers) else f"{again} of {len(layers)} layers "
    mark = f" ({share}recomputed)" if again else ""
    return MemoryItem("activations" + mark, in_flight * sum(_kept(inputs, layer) for layer in layers))


def _kept(inputs: MemoryInputs, layer: int) -> int:
    """Bytes that a layer keeps of a micro-batch for its backward pass."""
    arguments = (inputs.widths[layer], inputs.layout, inputs.num_tokens, inputs.element_bytes)
    if inputs.recomputes(layer):
        return activations.checkpoint_bytes(*arguments)
    return activations.layer_bytes(*arguments, inputs.config.memory.recompute_operators)


def _copied_weights(inputs: MemoryInputs, stage: int, keeps_all: bool) -> MemoryItem:
    """Weights as the matrix products read them: cast, and gathered if the parallel optimizer has sharded them."""
    model, state = inputs.config.model, inputs.states[stage]
    elements = state.num_gathered_elements
    if model.param_dtype == model.compute_dtype and inputs.layout.optimizer_shard == 1:
        elements = 0  # the parameters themselves
    elif not keeps_all:
        elements = max(elements // len(inputs.stage_layers(stage)), state.largest_gathered_elements)
    return MemoryItem("weights in compute dtype", elements * inputs.element_bytes)


def _largest_layer(inputs: MemoryInputs, stage: int) -> int:
    layout, num_tokens = inputs.layout, inputs.num_tokens
    return max(
        activations.layer_bytes(widths, layout, num_tokens, inputs.element_bytes)
        + activations.work_bytes(widths, layout, num_tokens)
        for widths in inputs.stage_widths(stage)
    )


def _logits(inputs: MemoryInputs, stage: int) -> MemoryItem:
    arguments = (inputs.dims, inputs.layout, inputs.num_tokens, inputs.element_bytes, inputs.config.memory.logit_tile)
    is_last = stage == inputs.layout.pipeline_stage - 1
    return MemoryItem("logits", activations.logit_bytes(*arguments) * is_last)


def _head_gradient(inputs: MemoryInputs, stage: int) -> MemoryItem:
    """Gradient of the head, which tiles of positions are added up in."""
    arguments = (inputs.dims, inputs.layout, inputs.num_tokens, inputs.element_bytes, inputs.config.memory.logit_tile)
    is_last = stage == inputs.layout.pipeline_stage - 1
    return MemoryItem("head's gradient", activations.head_gradient_bytes(*arguments) * is_last)


def _mask(inputs: MemoryInputs) -> MemoryItem:
    """The [rows, 1, length, length] mask of packed rows: one byte, and the comparison it is made from.

    Models with local attention have one with the window and one without.
    """
    rows, length = inputs.batch.rows_per_pipeline_micro_batch, inputs.batch.row_length
    num_masks = 2 if inputs.dims.local else 1
    return MemoryItem("attention mask", 2 * num_masks * rows * length**2 // inputs.layout.context_parallel)
