"""How long one optimiser update would take under a layout: the model by which the search ranks layouts.

It ranks, it does not predict: the rates below are round numbers for an Ascend 910B, and only their ratios matter.
"""

import math
from dataclasses import dataclass

from mindrlhf.config.training import trains_sharded
from mindrlhf.dryrun.plan.groups import num_nodes
from mindrlhf.dryrun.plan.memory import MemoryInputs

# Matrix products of a device in bfloat16 at the utilisation that large models reach, floating-point operations/s.
DEVICE_FLOPS = 300e12 * 0.45
# What a device sends and receives in a collective, bytes/s: over the links inside a node, and over the network.
NODE_BYTES_PER_S = 150e9
NETWORK_BYTES_PER_S = 20e9
# A device that fills up to the last byte fails at the first uneven batch: less free memory than this costs score.
WANTED_SLACK = 0.1
GRADIENT_BYTES = 4


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


def plan_vision(inputs: MemoryInputs, num_parameters: int) -> VisionPlan | None:
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
    seconds = passes * num_tokens * operations / inputs.layout.data_parallel / DEVICE_FLOPS
    run_bytes = num_tokens * per_token * (width + 3 * vision.intermediate_size) * inputs.element_bytes
    return VisionPlan(num_parameters, num_tokens, operations, passes, seconds, run_bytes)


@dataclass(frozen=True)
class Cost:
    """Seconds of one update by cause, on the slowest rank.

    Attributes:
        compute: matrix products, recomputation included.
        imbalance: waiting for the pipeline stage with most work.
        bubble: waiting for the pipeline to fill and drain.
        tensor: collectives of tensor and context parallelism.
        expert: exchange of tokens between experts.
        data: gradients, and weights that the optimiser shard gathers.
        slack: share of the device that stays free.
        weights: an update's share of the step's transfer of weights between nodes.
    """

    compute: float
    imbalance: float
    bubble: float
    tensor: float
    expert: float
    data: float
    slack: float
    weights: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the update."""
        return self.compute + self.imbalance + self.bubble + self.tensor + self.expert + self.data + self.weights

    @property
    def score(self) -> float:
        """Seconds, raised by the share of the wanted slack that is missing; lower is better."""
        return self.seconds * (1 + max(0.0, WANTED_SLACK - self.slack))


def estimate_cost(inputs: MemoryInputs, num_active: int, slack: float, node_size: int) -> Cost:
    """Estimate one update.

    The work of a training token is 6 operations per active parameter, and 6 * layers * width * length for causal
    attention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B, halved for the mask); recomputation adds a forward
    pass, a third. A pipeline of p stages that runs m micro-batches idles for (p - 1) / (m + p - 1) of the time
    (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Args:
        num_active: parameters that a token meets.
        slack: share of the device that stays free.
    """
    layout, batch = inputs.layout, inputs.batch
    repeat = 4 / 3 if inputs.config.model.recompute else 1.0
    stage_operations = _stage_operations(inputs, num_active)
    compute = sum(stage_operations) * repeat * batch.num_tokens_per_update / layout.world_size / DEVICE_FLOPS
    uneven = max(stage_operations) * layout.pipeline_stage / sum(stage_operations)
    most_layers = max(len(inputs.stage_widths(stage)) for stage in range(layout.pipeline_stage))
    tensor, expert = _layer_exchange(inputs, most_layers, node_size)
    busy = compute * uneven + tensor + expert
    return Cost(
        compute=compute,
        imbalance=compute * (uneven - 1),
        bubble=busy * (layout.pipeline_stage - 1) / batch.num_pipeline_micro_batches,
        tensor=tensor,
        expert=expert,
        data=_gradient_exchange(inputs, node_size),
        slack=slack,
    )


def _stage_operations(inputs: MemoryInputs, num_active: int) -> list[float]:
    """Operations of one training token in each pipeline stage: layers, and in the last the vocabulary projection."""
    num_layers, vocabulary = len(inputs.widths), inputs.dims.vocab_size * inputs.dims.hidden_size
    in_layers = (num_active - (1 if inputs.dims.tied else 2) * vocabulary) / num_layers
    attention = inputs.widths[0].context * inputs.batch.row_length
    stages = range(inputs.layout.pipeline_stage)
    operations = [6.0 * len(inputs.stage_widths(stage)) * (in_layers + attention) for stage in stages]
    operations[-1] += 6.0 * vocabulary
    return operations


def _layer_exchange(inputs: MemoryInputs, num_layers: int, node_size: int) -> tuple[float, float]:
    """Seconds that the layers of a stage communicate: tensor and context parallelism, and experts."""
    layout, batch, widths = inputs.layout, inputs.batch, inputs.widths[-1]
    num_runs = batch.num_micro_batches_per_rank * batch.num_pipeline_micro_batches
    # Attention and MLP gather and reduce once each in the forward pass, once in the backward, once when recomputed.
    passes = 3 if inputs.config.model.recompute else 2
    hidden_bytes = inputs.num_tokens * widths.hidden * inputs.element_bytes
    model, context, expert = layout.model_parallel, layout.context_parallel, layout.expert_parallel
    per_layer = 2 * 2 * hidden_bytes * (model - 1) / model / _rate(range(model), node_size)
    key_bytes = inputs.num_tokens * (widths.key + widths.value) * inputs.element_bytes / model
    context_ranks = range(0, model * context, model)
    per_layer += key_bytes * (context - 1) / _rate(context_ranks, node_size)
    to_experts = 0.0
    if widths.num_experts and expert > 1:
        sent = hidden_bytes * widths.experts_per_token / (model if layout.use_seq_parallel else 1)
        to_experts = 2 * sent * (expert - 1) / expert / _rate(range(expert), node_size)
    return num_layers * num_runs * passes * per_layer, num_layers * num_runs * passes * to_experts


def _gradient_exchange(inputs: MemoryInputs, node_size: int) -> float:
    """Seconds of summing gradients and of gathering sharded weights, both once a micro-batch.

    On a CPU the sum comes once an update, outside of the graph of a micro-batch.
    """
    layout, num_calls = inputs.layout, inputs.batch.num_micro_batches_per_rank
    replicas = layout.data_parallel * layout.context_parallel
    if replicas == 1:
        return 0.0
    elements = max(state.num_gathered_elements for state in inputs.states)
    if layout.optimizer_shard != 1:
        # Gradients are scattered where they are summed; all-reducing them would be twice that.
        moved = num_calls * elements * (GRADIENT_BYTES + inputs.element_bytes)
    else:
        moved = (num_calls if trains_sharded(inputs.config) else 1) * elements * 2 * GRADIENT_BYTES
    rate = _rate(range(0, layout.stage_size, layout.model_parallel), node_size)
    return moved * (replicas - 1) / replicas / rate


def _rate(ranks: range, node_size: int) -> float:
    return NODE_BYTES_PER_S if num_nodes(ranks, node_size) == 1 else NETWORK_BYTES_PER_S


def divisors(value: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [size for size in range(1, math.isqrt(value) + 1) if value % size == 0]
    return sorted({*small, *(value // size for size in small)})
