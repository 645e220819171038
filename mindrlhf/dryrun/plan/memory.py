"""Device memory of one rank of each pipeline stage, in each phase of the loop."""

from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.algorithms.optimizers import OPTIMIZERS
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import trains_sharded
from mindrlhf.dryrun.plan import activations
from mindrlhf.dryrun.plan.parameters import (
    ADAPTER_BYTES,
    ELEMENT_BYTES,
    GRADIENT_SUM_BYTES,
    MOMENT_BYTES,
    StageState,
)
from mindrlhf.dryrun.plan.rollout import RolloutPlan
from mindrlhf.layout.batch import BatchPlan
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.parameter_buckets import NUM_BUCKETS
from mindrlhf.layout.rows import updates_return_outputs
from mindrlhf.layout.server_shards import FIXED_WORKSPACE_BYTES, LOGIT_BYTES
from mindrlhf.specs import ModelDims
from mindrlhf.system.sizes import format_size

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
        how: the size as a calculation.
    """

    name: str
    size_bytes: int
    exact: bool
    how: str


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
        """Of the optimiser's state."""
        return f"{OPTIMIZERS[self.config.optimizer.type].title} moments"

    @property
    def element_bytes(self) -> int:
        """Of the compute dtype."""
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
        return [layer for layer, place in enumerate(self.layer_stages) if place == stage]

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
        memory.append(_phase(STEP, stage, resident, [_step_item(inputs, state), asleep]))
        memory.append(_phase(TRANSFER, stage, while_gradients, [_rollout_weights(inputs), asleep]))
    return memory


def _phase(name: str, stage: int, resident: list[MemoryItem], items: list[MemoryItem]) -> PhaseMemory:
    return PhaseMemory(name, stage, tuple(item for item in (*resident, *items) if item.size_bytes))


def _resident(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    """Memory that the trainer holds on the device in every phase."""
    state = inputs.states[stage]
    width = ELEMENT_BYTES[inputs.config.model.param_dtype]
    num_trained = state.gradient_sums // GRADIENT_SUM_BYTES
    num_moments, rest = divmod(state.moments // MOMENT_BYTES, num_trained)
    kept = f"{state.moments // MOMENT_BYTES:,}" if rest else f"{num_trained:,} x {num_moments}"
    num_weights = state.num_elements - state.adapters // ADAPTER_BYTES
    own_width = ADAPTER_BYTES if state.adapters else width
    number = inputs.num_communicators
    items = [
        MemoryItem("parameters", state.parameters, True, f"{num_weights:,} x {width} B"),
        MemoryItem("adapters", state.adapters, True, f"{num_trained:,} x {ADAPTER_BYTES} B"),
        MemoryItem(inputs.moments_name, state.moments, True, f"{kept} x {MOMENT_BYTES} B"),
        MemoryItem(GRADIENT_SUMS, state.gradient_sums, True, f"{num_trained:,} x {GRADIENT_SUM_BYTES} B"),
        MemoryItem(
            "gradient accumulators",
            state.accumulators,
            True,
            f"{state.accumulators // own_width:,} x {own_width} B: not sharded by the parallel optimizer",
        ),
    ]
    if inputs.reference is not None:
        size = inputs.reference.states[stage].parameters
        how = "as the parameters" if size == state.parameters else f"{size // width:,} x {width} B"
        items.append(MemoryItem("reference model", size, True, how))
    runtime = _CONTEXT_BYTES + number * _COMMUNICATOR_BYTES
    groups = f"{number} groups (the world and those of the layout) x {format_size(_COMMUNICATOR_BYTES)}"
    how = f"{format_size(_CONTEXT_BYTES)} + {groups}"
    return [*items, MemoryItem(RUNTIME, runtime, False, how)]


def _rollout_items(inputs: MemoryInputs) -> list[MemoryItem]:
    rollout = inputs.rollout
    workspace = (
        f"{format_size(FIXED_WORKSPACE_BYTES)} + max_num_seqs {rollout.max_num_seqs} x {inputs.dims.vocab_size:,} "
        f"tokens x {LOGIT_BYTES} B"
    )
    return [
        _rollout_weights(inputs),
        MemoryItem("rollout workspace", rollout.workspace, False, workspace),
        MemoryItem(
            "KV cache",
            max(0, rollout.kv_cache),
            False,
            f"the server's share {format_size(rollout.share)} - weights - workspace",
        ),
    ]


def _asleep(inputs: MemoryInputs) -> MemoryItem:
    """Memory of a sleeping server: vLLM's sleep frees weights and cache alone, not recorded graphs, kernels,
    and HCCL's buffers where several devices make a server (its group, and the world of its workers)."""
    rollout = inputs.config.rollout
    groups = 2 if rollout.tensor_parallel > 1 and not rollout.sleep_extra_cleanup else 0
    how = f"graphs and kernels {format_size(FIXED_WORKSPACE_BYTES)}"
    if groups:
        how += f" + {groups} groups x {format_size(_COMMUNICATOR_BYTES)}"
    size = FIXED_WORKSPACE_BYTES + groups * _COMMUNICATOR_BYTES
    on_device = inputs.config.run.device != "cpu"
    return MemoryItem(ASLEEP, size if on_device else 0, False, how)


def _rollout_weights(inputs: MemoryInputs) -> MemoryItem:
    width = ELEMENT_BYTES[inputs.config.rollout.dtype]
    size = inputs.rollout.weights
    how = f"{size // width:,} x {width} B: tensor_parallel {inputs.config.rollout.tensor_parallel}"
    return MemoryItem("rollout weights", size, False, how)


def _largest_forward(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    passes = [_forward_items(one, stage) for one in (inputs, inputs.reference) if one is not None]
    return max(passes, key=lambda items: sum(item.size_bytes for item in items))


def _forward_items(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    layer = _largest_layer(inputs, stage)
    return [
        _copied_weights(inputs, stage, keeps_all=False),
        MemoryItem("one layer's activations", layer, False, _per_token(inputs, layer)),
        _logits(inputs, stage),
        _mask(inputs),
    ]


def _update_items(inputs: MemoryInputs, stage: int) -> list[MemoryItem]:
    state, layer = inputs.states[stage], _largest_layer(inputs, stage)
    again = [inputs.recomputes(number) for number in inputs.stage_layers(stage)]
    # Values and gradients of the layer that is at work.
    copies = 2 if any(again) or inputs.config.memory.recompute_operators else 1
    return [
        # Gathered weights are kept from the forward to the backward pass; casts are computed anew with their layer.
        _copied_weights(inputs, stage, keeps_all=inputs.layout.optimizer_shard != 1 or not all(again)),
        _activations(inputs, stage),
        MemoryItem("one layer's work", copies * layer, False, f"{copies} x {_per_token(inputs, layer)}"),
        MemoryItem(
            "largest gradient", state.largest_gradient_elements * 4, False, f"{state.largest_gradient_elements:,} x 4 B"
        ),
        _logits(inputs, stage),
        _head_gradient(inputs, stage),
        _mask(inputs),
    ]


def _step_item(inputs: MemoryInputs, state: StageState) -> MemoryItem:
    """Temporaries of the optimiser: of a bucket's parameters, and matrices that it gathers for them."""
    elements, how = _of_bucket(state.gradient_sums // GRADIENT_SUM_BYTES, state.largest_elements)
    size, how = NUM_STEP_COPIES * elements * 4, f"{NUM_STEP_COPIES} x {how} x 4 B"
    if state.gathered_matrices:
        gathered, more = _of_bucket(state.gathered_matrices, state.largest_gathered_matrices)
        size, how = size + gathered * 4, f"{how} + {more} x 4 B of matrices"
    return MemoryItem("optimizer's work", size, False, how)


def _of_bucket(elements: int, largest: int) -> tuple[int, str]:
    """Return the elements of the parameters of a bucket: at most the largest and a share of the others."""
    others = elements - largest
    return largest + others // NUM_BUCKETS, f"({largest:,} + {others:,} / {NUM_BUCKETS})"


def _activations(inputs: MemoryInputs, stage: int) -> MemoryItem:
    """Activations of a stage for the backward pass.

    Under 1F1B a stage has at most as many micro-batches in flight as there are stages from it to the last
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
    """
    in_flight = min(inputs.batch.num_pipeline_micro_batches, inputs.layout.pipeline_stage - stage)
    layers = inputs.stage_layers(stage)
    kept = sum(_kept(inputs, layer) for layer in layers)
    micro_batches = f"{in_flight} micro-batch{'es' if in_flight > 1 else ''} in flight x {len(layers)} layers"
    how = f"{micro_batches} x {_per_token(inputs, kept // len(layers))}"
    again = sum(map(inputs.recomputes, layers))
    share = "" if again == len(layers) else f"{again} of {len(layers)} layers "
    mark = f" ({share}recomputed)" if again else ""
    return MemoryItem("activations" + mark, in_flight * kept, False, how)


def _kept(inputs: MemoryInputs, layer: int) -> int:
    """Bytes that a layer keeps of a micro-batch for its backward pass."""
    arguments = (inputs.widths[layer], inputs.layout, inputs.num_tokens, inputs.element_bytes)
    if inputs.recomputes(layer):
        return activations.checkpoint_bytes(*arguments)
    return activations.layer_bytes(*arguments, inputs.config.memory.recompute_operators)


def _per_token(inputs: MemoryInputs, size_bytes: int) -> str:
    return f"{inputs.num_tokens:,} positions x {size_bytes / inputs.num_tokens:,.0f} B"


def _copied_weights(inputs: MemoryInputs, stage: int, keeps_all: bool) -> MemoryItem:
    """Weights as the matrix products read them: cast, and gathered if the parallel optimizer has sharded them."""
    name = "weights in compute dtype"
    model, state = inputs.config.model, inputs.states[stage]
    if model.param_dtype == model.compute_dtype and inputs.layout.optimizer_shard == 1:
        return MemoryItem(name, 0, False, "the parameters themselves")
    elements, what = state.num_gathered_elements, "all layers"
    if not keeps_all:
        elements, what = elements // max(1, len(inputs.stage_widths(stage))), "a layer's share of them"
    if elements < state.largest_gathered_elements:
        elements, what = state.largest_gathered_elements, "the largest parameter"
    return MemoryItem(name, elements * inputs.element_bytes, False, f"{elements:,} x {inputs.element_bytes} B: {what}")


def _largest_layer(inputs: MemoryInputs, stage: int) -> int:
    arguments = (inputs.layout, inputs.num_tokens, inputs.element_bytes)
    return max(activations.layer_bytes(widths, *arguments) for widths in inputs.stage_widths(stage))


def _logits(inputs: MemoryInputs, stage: int) -> MemoryItem:
    if stage != inputs.layout.pipeline_stage - 1:
        return MemoryItem("logits", 0, False, "in the last stage only")
    tile, width = inputs.config.memory.head_tile, activations.logit_width(inputs.element_bytes)
    positions, vocabulary = activations.logit_tile(inputs.dims, inputs.layout, inputs.num_tokens, tile)
    words = f"{inputs.dims.vocab_size:,} tokens / model_parallel {inputs.layout.model_parallel}"
    if tile.vocabulary:
        words = f"{vocabulary:,} tokens"
    size = activations.logit_bytes(inputs.dims, inputs.layout, inputs.num_tokens, inputs.element_bytes, tile)
    return MemoryItem("logits", size, False, f"{positions:,} positions x {words} x {width} B")


def _head_gradient(inputs: MemoryInputs, stage: int) -> MemoryItem:
    """The head's gradient where tiles of positions are added up."""
    arguments = (inputs.dims, inputs.layout, inputs.num_tokens, inputs.element_bytes, inputs.config.memory.head_tile)
    size = activations.head_gradient_bytes(*arguments) if stage == inputs.layout.pipeline_stage - 1 else 0
    return MemoryItem("head's gradient", size, False, "float32, added up over tiles of positions")


def _mask(inputs: MemoryInputs) -> MemoryItem:
    """The [rows, 1, length, length] mask of packed rows: one byte, and the comparison it is made from."""
    rows, length = inputs.batch.rows_per_pipeline_micro_batch, inputs.batch.row_length
    context = inputs.layout.context_parallel
    how = f"{rows} sequence{'s' if rows > 1 else ''} x {length:,} x {length:,} x 2 B"
    num_masks = 2 if inputs.dims.local else 1
    if num_masks > 1:
        how += " x 2, with the window and without"
    if context > 1:
        how += f" / context_parallel {context}"
    return MemoryItem("attention mask", 2 * num_masks * rows * length**2 // context, False, how)
