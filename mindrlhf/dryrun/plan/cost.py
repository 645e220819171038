"""How long one optimiser update takes under a layout, by formula: what the search ranks by, and the plan's times.

Products, memory traffic and collectives are added up from the numbers below, which compiled graphs have: `mindrlhf plan
--compile --kernels` counts them, and a test holds these seconds to a replay of those kernels.
"""

import math
from dataclasses import dataclass

from mindrlhf.config.training import trains_sharded
from mindrlhf.dryrun.plan.devices import Device
from mindrlhf.dryrun.plan.memory import MemoryInputs

# A device that fills up to the last byte fails at the first uneven batch: less free memory than this costs score.
WANTED_SLACK = 0.1
GRADIENT_BYTES = 4
# Bytes that a layer's kernels move beside the products, forward and backward: for each position and channel of the
# hidden states that a rank holds, of the MLP, of queries, of keys and values; and for each weight, once a call.
_HIDDEN_BYTES, _MLP_BYTES, _QUERY_BYTES, _KEY_BYTES, _WEIGHT_BYTES = (20, 24), (6, 10), (44, 46), (22, 20), (5, 8)
# Gradients of pipeline micro-batches are added up, in float32, in a copy that the optimiser does not shard.
_ACCUMULATED_BYTES = 10
# The same for each logit, and for each element of a rank's shards in a call and in an update's last.
LOGIT_BYTES, STATE_BYTES = 30, (12, 260)
# Share of the time of collectives that other work hides.
HIDDEN_GATHERS, HIDDEN_REDUCTIONS, HIDDEN_TENSOR = 0.5, 0.58, 0.1
# Kernels of a layer, forward and backward.
_LAYER_KERNELS = (33, 38)
# FlashAttention's backward pass has five products, the forward pass two.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class VisionPlan:
    """The frozen vision tower, which each image passes once in a step on every rank that has samples of it.

    Attributes:
        num_parameters: of the tower, whole on every rank of the first pipeline stage.
        num_image_tokens: that a prompt may have, if it holds nothing else.
        operations_per_token: of the tower, floating-point, for an image of that many tokens.
        num_passes: of prompts through towers, at most.
        seconds: of a step, at most, on every rank.
        run_bytes: what the widest operator holds for one such image.
    """

    num_parameters: int
    num_image_tokens: int
    operations_per_token: int
    num_passes: int
    seconds: float
    run_bytes: int


def plan_vision(inputs: MemoryInputs, num_parameters: int, device: Device) -> VisionPlan | None:
    """Estimate the work of a vision tower; None for a model of text.

    A patch costs 2 operations per parameter of blocks and patch embedding, and 4 * width * reach in each attention: the
    scores and their product with the values. A token has the patches that are merged into it, and the merger's two
    products.
    """
    config, vision = inputs.config, inputs.dims.vision
    if vision is None:
        return None
    num_tokens = inputs.batch.row_length - config.rollout.max_response_length
    width, per_token = vision.hidden_size, vision.merge_size**2
    block = 4 * width**2 + (2 + vision.is_gated) * width * vision.intermediate_size
    num_full = len(vision.full_attention_blocks)
    window = vision.window_side**2 * per_token
    reach = num_full * num_tokens * per_token + (vision.depth - num_full) * window
    per_patch = 2 * (vision.depth * block + vision.patch_channels * width) + 4 * width * reach
    projection = 2 * vision.merged_size * (vision.merged_size + inputs.dims.hidden_size)
    merger = projection * (1 + len(vision.deepstack_blocks))
    operations = per_token * per_patch + merger
    num_prompts = config.training.chunk_size * config.training.num_rollouts
    passes = num_prompts * min(config.algorithm.num_generations, inputs.layout.data_parallel)
    # The ranks that share a replica have a tower each and the same images.
    seconds = passes * num_tokens * operations / inputs.layout.data_parallel / device.product_rate
    run_bytes = num_tokens * per_token * (width + 3 * vision.intermediate_size) * inputs.element_bytes
    return VisionPlan(num_parameters, num_tokens, operations, passes, seconds, run_bytes)


@dataclass(frozen=True)
class Cost:
    """Seconds of one update by cause, on the slowest rank.

    Attributes:
        compute: matrix products, recomputation included.
        vector: memory traffic of all other kernels of layers and head.
        imbalance: waiting for the pipeline stage with most work.
        bubble: waiting for the pipeline to fill and drain.
        tensor: collectives of tensor and context parallelism.
        expert: exchange of tokens between experts.
        data: gradients, and weights that the optimiser shard gathers.
        state: sums of gradients, their norm, the optimiser.
        slack: share of the device that stays free.
        weights: an update's share of the step's transfer of weights between nodes.
        forward: a pass without gradients over the same tokens, which is no part of the update.
        num_calls: of the graph in an update.
    """

    compute: float
    vector: float
    imbalance: float
    bubble: float
    tensor: float
    expert: float
    data: float
    state: float
    slack: float
    forward: float
    num_calls: int
    weights: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the update."""
        causes = (self.compute, self.vector, self.imbalance, self.bubble, self.tensor, self.expert)
        return sum(causes) + self.data + self.state + self.weights

    @property
    def score(self) -> float:
        """Seconds, raised by the share of the wanted slack that is missing; lower is better."""
        return self.seconds * (1 + max(0.0, WANTED_SLACK - self.slack))


def estimate_cost(inputs: MemoryInputs, num_active: int, slack: float, device: Device) -> Cost:
    """Estimate one update.

    A position costs 2 operations for each parameter that it meets (Kaplan et al. 2020, arXiv:2001.08361, section 2.1),
    and causal attention 2 * width * length, half of the square; the backward pass has twice as many products, five
    halves in attention (Dao 2023, arXiv:2307.08691, section 3.1), and recomputation adds a forward pass. A pipeline of
    p stages that runs m micro-batches idles for (p - 1) / (m + p - 1) of the time (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2).

    Args:
        num_active: parameters that a token meets.
        slack: share of the device that stays free.
    """
    layout, batch = inputs.layout, inputs.batch
    calls, micro_batches = batch.num_micro_batches_per_rank, batch.num_pipeline_micro_batches
    stages = [_StageWork(inputs, num_active, stage, device) for stage in range(layout.pipeline_stage)]
    runs = calls * micro_batches
    slowest = max(one.seconds for one in stages)
    mean_compute, mean_vector = (
        sum(values) / len(stages) for values in zip(*((one.compute, one.vector) for one in stages))
    )
    mean = sum(one.seconds for one in stages) / len(stages)
    most_layers = max(len(inputs.stage_widths(stage)) for stage in range(layout.pipeline_stage))
    tensor, expert = _layer_exchange(inputs, most_layers, device)
    gathers, reductions = _data_exchange(inputs, device)
    idle = (layout.pipeline_stage - 1) / micro_batches
    forward = max(one.forward for one in stages) + (tensor + expert) / _passes(inputs)
    return Cost(
        compute=runs * mean_compute,
        vector=runs * mean_vector,
        imbalance=runs * (slowest - mean),
        bubble=runs * (slowest + tensor + expert) * idle,
        tensor=runs * tensor,
        expert=runs * expert,
        data=calls * gathers + (calls if trains_sharded(inputs.config) else 1) * reductions,
        state=_state_seconds(inputs, calls, device),
        slack=slack,
        forward=runs * forward * (1 + idle) + calls * gathers,
        num_calls=calls,
    )


class _StageWork:
    """Seconds of a stage for one pipeline micro-batch, without collectives.

    Attributes:
        compute, vector: of products, and of the other kernels.
        forward: of both without gradients.
    """

    def __init__(self, inputs: MemoryInputs, num_active: int, stage: int, device: Device):
        layout, widths = inputs.layout, inputs.stage_widths(stage)
        tensor, positions = layout.model_parallel, inputs.num_tokens
        vocabulary = inputs.dims.vocab_size * inputs.dims.hidden_size
        in_layers = (num_active - (1 if inputs.dims.tied else 2) * vocabulary) / len(inputs.widths)
        again = sum(map(inputs.recomputes, inputs.stage_layers(stage)))
        products = 2.0 * positions * in_layers / tensor
        attention = sum(one.query + one.context for one in widths) / len(widths)
        attention *= positions * inputs.batch.row_length / tensor
        head, logits = 0.0, 0.0
        if stage == layout.pipeline_stage - 1:
            head, logits = 2.0 * positions * vocabulary / tensor, positions * inputs.dims.vocab_size / tensor
        forward = len(widths) * (products + attention) + head
        backward = len(widths) * (2 * products + _ATTENTION_BACKWARD * attention) + 2 * head
        self.compute = (forward + backward + again * (products + attention)) / device.product_rate
        ahead, back = (_vector_bytes(inputs, stage, backward) for backward in (False, True))
        weights = inputs.states[stage].num_gathered_elements / inputs.batch.num_pipeline_micro_batches
        moved = ahead * (1 + again / len(widths)) + back + LOGIT_BYTES * logits + sum(_WEIGHT_BYTES) * weights
        self.vector = moved / device.memory_rate
        launches = len(widths) * (_LAYER_KERNELS[0] + _LAYER_KERNELS[1]) + again * _LAYER_KERNELS[0]
        self.vector = max(self.vector, launches * device.launch_s - self.compute)
        self.forward = forward / device.product_rate + (
            ahead + _WEIGHT_BYTES[0] * weights + LOGIT_BYTES / 2 * logits
        ) / device.memory_rate
        self.seconds = self.compute + self.vector


def _vector_bytes(inputs: MemoryInputs, stage: int, backward: bool) -> float:
    """Bytes that the kernels of a stage's layers move beside the products, in a pass."""
    layout = inputs.layout
    tensor, split = layout.model_parallel, layout.model_parallel if layout.use_seq_parallel else 1
    per_position = 0.0
    for one in inputs.stage_widths(stage):
        mlp = one.mlp + one.shared + one.expert * one.experts_per_token
        per_position += _HIDDEN_BYTES[backward] * one.hidden / split
        per_position += _MLP_BYTES[backward] * mlp / tensor + _QUERY_BYTES[backward] * one.query / tensor
        per_position += _KEY_BYTES[backward] * (one.key + one.value) / tensor
    return per_position * inputs.num_tokens


def _state_seconds(inputs: MemoryInputs, num_calls: int, device: Device) -> float:
    """Seconds of an update for sums of gradients, and in its last call norm and optimiser."""
    elements = max(state.gradient_sums for state in inputs.states) / GRADIENT_BYTES
    moved = (STATE_BYTES[0] * (num_calls - 1) + STATE_BYTES[1]) * elements
    if any(state.accumulators for state in inputs.states):
        added = max(state.num_gathered_elements for state in inputs.states) * inputs.batch.num_pipeline_micro_batches
        moved += num_calls * _ACCUMULATED_BYTES * added
    return moved / device.memory_rate


def _passes(inputs: MemoryInputs) -> int:
    return 3 if inputs.config.model.recompute else 2


def _layer_exchange(inputs: MemoryInputs, num_layers: int, device: Device) -> tuple[float, float]:
    """Seconds that the layers of a stage communicate in a pipeline micro-batch: tensor and context parallelism, and
    experts."""
    layout, widths = inputs.layout, inputs.widths[-1]
    # Attention and MLP gather and reduce once each in the forward pass, once in the backward, once when recomputed.
    passes = _passes(inputs)
    hidden_bytes = inputs.num_tokens * widths.hidden * inputs.element_bytes
    model, context, expert = layout.model_parallel, layout.context_parallel, layout.expert_parallel
    per_layer = 0.0
    if model > 1:
        each = hidden_bytes * (model - 1) / model / device.exchange_rate(range(model)) + device.collective_s
        per_layer += 4 * each * (1 - HIDDEN_TENSOR)
    if context > 1:
        key_bytes = inputs.num_tokens * (widths.key + widths.value) * inputs.element_bytes / model
        per_layer += key_bytes * (context - 1) / device.exchange_rate(range(0, model * context, model))
    to_experts = 0.0
    if widths.num_experts and expert > 1:
        sent = hidden_bytes * widths.experts_per_token / (model if layout.use_seq_parallel else 1)
        to_experts = 2 * sent * (expert - 1) / expert / device.exchange_rate(range(expert))
    return num_layers * passes * per_layer, num_layers * passes * to_experts


def _data_exchange(inputs: MemoryInputs, device: Device) -> tuple[float, float]:
    """Seconds of a call to gather sharded weights, and to sum gradients.

    On a CPU the sum comes once an update, outside of the graph of a micro-batch.
    """
    layout = inputs.layout
    replicas = layout.data_parallel * layout.context_parallel
    if replicas == 1:
        return 0.0, 0.0
    elements = max(state.num_gathered_elements for state in inputs.states)
    rate = device.exchange_rate(range(0, layout.stage_size, layout.model_parallel))
    share = (replicas - 1) / replicas / rate
    if layout.optimizer_shard == 1:
        return 0.0, 2 * elements * GRADIENT_BYTES * share * (1 - HIDDEN_REDUCTIONS)
    gathered = elements * inputs.element_bytes * share * (1 - HIDDEN_GATHERS)
    # Gradients are scattered where they are summed; all-reducing them would be twice that.
    return gathered, elements * GRADIENT_BYTES * share * (1 - HIDDEN_REDUCTIONS)


def divisors(value: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [size for size in range(1, math.isqrt(value) + 1) if value % size == 0]
    return sorted({*small, *(value // size for size in small)})
