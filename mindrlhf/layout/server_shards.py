"""Shards of Hugging Face tensors on the devices of a rollout server: vLLM's cuts for tensor parallelism.

Queries, keys, values, gates and up projections are cut along their rows, output and down projections along their
columns, the vocabulary along its words; experts like dense layers. Of fewer key-value heads than devices each device
has the one that its queries use. What is not named here is whole everywhere.
(vllm/model_executor/layers: linear.py, vocab_parallel_embedding.py, fused_moe/layer.py.)
"""

import math
from collections.abc import Iterable

from mindrlhf.specs import ModelDims, ParameterRule

Box = tuple[tuple[int, int], ...]  # (start, stop) per axis
# vLLM pads the vocabulary to a multiple of this before it cuts it.
_VOCABULARY_MULTIPLE = 64
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")

# Graphs, compiled kernels and the activations of a prefill, beside float32 logits of one decoding step.
FIXED_WORKSPACE_BYTES = 1_500_000_000
LOGIT_BYTES = 4


def weight_elements(rules: Iterable[ParameterRule], dims: ModelDims, num_devices: int) -> int:
    """Return the elements that each device of a server holds of the model."""
    return sum(-(-math.prod(rule.mf_shape(dims)) // (num_devices if is_sharded(rule) else 1)) for rule in rules)


def workspace_bytes(dims: ModelDims, max_num_seqs: int) -> int:
    """Estimate what a device of a server needs beside weights and cache."""
    return FIXED_WORKSPACE_BYTES + max_num_seqs * dims.vocab_size * LOGIT_BYTES


def is_sharded(rule: ParameterRule) -> bool:
    """True when tensor parallelism cuts a parameter in the server: vLLM cuts every expert, the shared ones too."""
    return _axis(rule, 0) is not None


def server_box(rule: ParameterRule, dims: ModelDims, part: int, num_devices: int, first: int, last: int) -> Box:
    """Return what some devices of a server hold of a tensor.

    Args:
        rule: of the tensor.
        part: its place among those that the rule fuses, of one expert.
        num_devices: of the server.
        first, last: the devices, from ``first`` on and before ``last``.
    """
    shape = rule.shape(dims)[part]
    axis = _axis(rule, part)
    if axis is None or last - first == num_devices:
        return tuple((0, size) for size in shape)
    size = shape[axis]
    if rule.mf_name in _VOCABULARY:
        padded = -(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        start, stop = (min(size, padded * device // num_devices) for device in (first, last))
    elif rule.transform == "qkv" and part > 0 and dims.num_kv_heads < num_devices:
        head = size // dims.num_kv_heads
        start = first * dims.num_kv_heads // num_devices * head
        stop = ((last - 1) * dims.num_kv_heads // num_devices + 1) * head
    else:
        start, stop = size * first // num_devices, size * last // num_devices
    return tuple((start, stop) if place == axis else (0, length) for place, length in enumerate(shape))


def _axis(rule: ParameterRule, part: int) -> int | None:
    if rule.transform == "expert_gate_up":
        return 0
    if rule.transform == "expert_down":
        return 1
    if ".shared_experts." in rule.mf_name:
        return 0 if rule.transform == "gate_up" else 1
    return rule.shard_axis
