"""Seconds of the phases of a step that devices could not go below: a roofline, and with it an estimate.

A phase takes as long as its products, its reads of memory or its sends need at the rates that the maker states
(Williams et al. 2009, doi:10.1145/1498765.1498785). Nothing was measured on a device.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.config.training import trains_sharded
from mindrlhf.dryrun.plan.memory import MemoryInputs, needs_logprobs
from mindrlhf.dryrun.plan.parameters import ELEMENT_BYTES, GRADIENT_SUM_BYTES

# What no roofline sees: kernels that are not fused, launches, the host between tokens, the longest response that all
# wait for, verifiers, sleep and wake, the way of weights between layouts. Published systems on Ascend take up to 34
# times their roofline; see tests/dryrun/plan/test_roofline.py.
UNSEEN = 40.0
# Averages that are assumed: of the longest response and the longest prompt that the config allows.
RESPONSE_SHARE, PROMPT_SHARE = 0.25, 0.5
# Of a token, the kernel of top-p on an NPU at least: issues 13842 and 12232 of vllm-ascend, 19 to 27 ms.
_TOP_P_SECONDS = 0.019
# AdamW reads a weight, a gradient and two moments, and writes all but the gradient.
_STATE_BYTES = 7 * 4


@dataclass(frozen=True)
class Device:
    """Peak rates of one device, as its maker states them: operations or bytes a second.

    Attributes:
        products: of matrix products in bfloat16.
        memory: read and written in the device's memory.
        link: sent over one link to another device of the node, in one direction.
        num_links: that send at once.
        network: sent between nodes.
        host: copied between device and host.
        node_size: devices that links connect; those of a node of the cluster if 0.
    """

    products: float
    memory: float
    link: float
    num_links: int
    network: float = 25e9
    host: float = 22e9
    node_size: int = 0

    def exchange_rate(self, ranks: Sequence[int]) -> float:
        """Bytes a second that each of some ranks sends while all of them exchange data."""
        if len({rank // self.node_size for rank in ranks}) > 1:
            return self.network
        return max(1, min(len(ranks) - 1, self.num_links)) * self.link


DEVICES = {
    "A2": Device(products=354e12, memory=1.6e12, link=28e9, num_links=7),
    # A die of an Ascend 910C (Zuo et al. 2025, arXiv:2506.12708, section 3).
    "A3": Device(products=376e12, memory=1.6e12, link=196e9, num_links=1, node_size=768),
}


@dataclass(frozen=True)
class StepSeconds:
    """Roofline of a step.

    Attributes:
        phases: seconds by phase, none hidden behind another.
        num_tokens: of prompts and responses of a step.
        num_devices: that share the step.
    """

    phases: dict[str, float]
    num_tokens: float
    num_devices: int

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """Tokens for each device and second: cautiously, and at the roofline."""
        best = self.num_tokens / self.seconds / self.num_devices
        return best / UNSEEN, best


def roofline(inputs: MemoryInputs, num_active: int, device: Device) -> StepSeconds:
    """Return the roofline of a step.

    A token costs 2 operations for each parameter that it meets (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).

    Args:
        num_active: parameters that a token meets.
    """
    config, batch = inputs.config, inputs.batch
    prompt = PROMPT_SHARE * batch.max_prompt_length
    response = RESPONSE_SHARE * config.rollout.max_response_length
    filled = min(1.0, (prompt + response) / batch.row_length)  # of a row for each sample, which is the most
    forward, update = (seconds * filled for seconds in _training(inputs, num_active, device))
    num_passes = config.training.num_minibatches
    held = max(state.num_elements for state in inputs.states) * ELEMENT_BYTES[config.rollout.dtype]
    state = max(stage.moments + stage.gradient_sums for stage in inputs.states) * config.memory.offload_optimizer
    state += max(stage.moments for stage in inputs.states) * config.memory.swap_moments * batch.num_updates
    phases = {
        "sampling": _sampling(inputs, num_active, device, prompt, response),
        "old log-probs": forward * num_passes * needs_logprobs(inputs),
        "reference": forward * num_passes * (config.algorithm.beta > 0),
        "update": update * batch.num_updates,
        "weights to the servers": (held + inputs.rollout.weights) / device.host,
        "optimizer state to the host and back": 2 * state / device.host,
    }
    num_samples = batch.num_prompts * config.algorithm.num_generations
    return StepSeconds(phases, num_samples * (prompt + response), inputs.layout.world_size)


def _sampling(inputs: MemoryInputs, num_active: int, device: Device, prompt: float, response: float) -> float:
    """Seconds in which a server decodes its samples.

    A token reads the weights, and keys and values of each sequence; attention and MLP of each layer are summed over the
    server's devices (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
    """
    rollout, context, tensor = inputs.rollout, prompt + response / 2, inputs.config.rollout.tensor_parallel
    num_samples = inputs.batch.num_samples_per_replica
    slots = max(1, min(rollout.max_num_seqs, int(rollout.num_cached_tokens / context), num_samples))
    hidden = sum(layer.hidden for layer in inputs.widths) * ELEMENT_BYTES[inputs.config.rollout.dtype]
    sums = 2 * hidden * 2 * (tensor - 1) / tensor / device.exchange_rate(range(tensor))
    products = 2 * num_active / tensor / device.products
    read = (rollout.weights + slots * rollout.kv_token * context) / device.memory
    step = max(read, slots * products) + slots * sums + _TOP_P_SECONDS * (inputs.config.rollout.top_p < 1)
    prompts = num_samples / inputs.config.algorithm.num_generations * prompt * (products + sums)
    return num_samples / slots * response * step + prompts


def _training(inputs: MemoryInputs, num_active: int, device: Device) -> tuple[float, float]:
    """Seconds of a pass without gradients over an update's rows, and of the update.

    The backward pass has twice the products of the forward pass, recomputation adds a forward pass; p pipeline stages
    that run m micro-batches idle for (p - 1) / m of their work (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
    """
    layout, batch, config = inputs.layout, inputs.batch, inputs.config
    micro_batches = batch.num_pipeline_micro_batches
    most_layers = max(len(inputs.stage_layers(stage)) for stage in range(layout.pipeline_stage))
    one_pass = inputs.num_tokens * _stage_operations(inputs, num_active) / layout.model_parallel / device.products
    exchange = most_layers * _layer_exchange(inputs, device)
    again = sum(map(inputs.recomputes, range(len(inputs.widths)))) / len(inputs.widths)
    runs = batch.num_micro_batches_per_rank * (micro_batches + layout.pipeline_stage - 1)
    gathered, reduced = _data_exchange(inputs, device)
    elements = max(state.gradient_sums for state in inputs.states) / GRADIENT_SUM_BYTES
    num_reductions = batch.num_micro_batches_per_rank if trains_sharded(config) else 1
    forward = runs * (one_pass + exchange) + batch.num_micro_batches_per_rank * gathered
    update = runs * ((3 + again) * one_pass + (2 + again) * exchange)
    update += batch.num_micro_batches_per_rank * gathered + num_reductions * reduced
    return forward, update + elements * _STATE_BYTES / device.memory


def _stage_operations(inputs: MemoryInputs, num_active: int) -> float:
    """Operations of a token in the products of the fullest pipeline stage; the last one has the head, one the layers.

    Looking up an embedding is no product.
    """
    head = inputs.dims.vocab_size * inputs.dims.hidden_size
    layers = 2 * (num_active - head * (1 if inputs.dims.tied else 2))
    # Causal attention computes half of the square.
    layers += sum(layer.query + layer.context for layer in inputs.widths) * inputs.batch.row_length
    counts = [len(inputs.stage_layers(stage)) for stage in range(inputs.layout.pipeline_stage)]
    return max(layers / len(inputs.widths) * max(counts), layers / len(inputs.widths) * counts[-1] + 2 * head)


def _layer_exchange(inputs: MemoryInputs, device: Device) -> float:
    """Seconds that a layer sends in a forward pass: tensor parallelism, context parallelism, experts."""
    layout, widths = inputs.layout, inputs.widths[-1]
    model, context, expert = layout.model_parallel, layout.context_parallel, layout.expert_parallel
    hidden = inputs.num_tokens * widths.hidden * inputs.element_bytes
    seconds = 0.0
    if model > 1:  # attention and MLP each gather and reduce
        seconds += 4 * hidden * (model - 1) / model / device.exchange_rate(range(model))
    if context > 1:
        keys = inputs.num_tokens * (widths.key + widths.value) * inputs.element_bytes / model
        seconds += keys * (context - 1) / device.exchange_rate(range(0, model * context, model))
    if widths.num_experts and expert > 1:
        sent = hidden * widths.experts_per_token / (model if layout.use_seq_parallel else 1)
        seconds += 2 * sent * (expert - 1) / expert / device.exchange_rate(range(expert))
    return seconds


def _data_exchange(inputs: MemoryInputs, device: Device) -> tuple[float, float]:
    """Seconds of a call to gather weights that the parallel optimizer has sharded, and to sum gradients."""
    layout = inputs.layout
    replicas = layout.data_parallel * layout.context_parallel
    if replicas == 1:
        return 0.0, 0.0
    elements = max(state.num_gathered_elements for state in inputs.states)
    share = (replicas - 1) / replicas / device.exchange_rate(range(0, layout.stage_size, layout.model_parallel))
    if layout.optimizer_shard == 1:
        return 0.0, 2 * elements * GRADIENT_SUM_BYTES * share
    return elements * inputs.element_bytes * share, elements * GRADIENT_SUM_BYTES * share


def of_node(device: Device, node_size: int) -> Device:
    """Return a device in nodes of so many, unless its own links reach further."""
    return device if device.node_size else dataclasses.replace(device, node_size=node_size)
