"""Shards of Hugging Face tensors on the devices of a rollout server: vLLM's cuts for tensor parallelism.

Queries, keys, values, gates and up projections are cut along their rows, output and down projections along their
columns, the vocabulary along its words; experts like dense layers. Of fewer key-value heads than devices each device
has the one that its queries use. What is not named here is whole everywhere.
(vllm/model_executor/layers: linear.py, vocab_parallel_embedding.py, fused_moe/layer.py.)
"""

import math
from collections.abc import Iterable

from mindrlhf.specs import ModelDims, ParameterRule

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


def _axis(rule: ParameterRule, part: int) -> int | None:
    if rule.transform == "expert_gate_up":
        return 0
    if rule.transform == "expert_down":
        return 1
    if ".shared_experts." in rule.mf_name:
        return 0 if rule.transform == "gate_up" else 1
    return rule.shard_axis
