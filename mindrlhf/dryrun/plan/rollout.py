"""Estimated memory of one rollout server's share of a device: weights, KV cache, workspace."""

from dataclasses import dataclass
from functools import lru_cache

from mindrlhf.config.rollout import RolloutSection
from mindrlhf.dryrun.plan.parameters import ELEMENT_BYTES, KnownRules
from mindrlhf.layout.server_shards import weight_elements, workspace_bytes
from mindrlhf.specs import ModelDims


@dataclass(frozen=True)
class RolloutPlan:
    """One device's share of a rollout server, in bytes unless named otherwise.

    Attributes:
        share: what the server may take: gpu_memory_utilization of the device.
        weights: its shards of the weights.
        workspace: logits, graphs, activations.
        kv_cache: the rest of the share; below 0 when nothing is left.
        kv_token: keys and values of one token in all layers.
        num_cached_tokens: tokens that the cache holds.
        num_full_sequences: sequences of the longest row that it holds at once.
        max_num_seqs: sequences that the server decodes at once at most.
    """

    share: int
    weights: int
    workspace: int
    kv_cache: int
    kv_token: int
    num_cached_tokens: int
    num_full_sequences: int
    max_num_seqs: int


def plan_rollout(
    rollout: RolloutSection, spec: KnownRules, dims: ModelDims, *, device_bytes: int, row_length: int
) -> RolloutPlan:
    """Estimate a device's share of a rollout server."""
    share = int(rollout.gpu_memory_utilization * device_bytes)
    weights = rollout_weight_elements(rollout.tensor_parallel, spec, dims) * ELEMENT_BYTES[rollout.dtype]
    states = rollout.max_num_seqs * dims.state_numbers(rollout.tensor_parallel) * ELEMENT_BYTES["float32"]
    workspace = workspace_bytes(dims, rollout.max_num_seqs) + states
    kv_cache = share - weights - workspace
    kv_token = kv_token_bytes(rollout, dims)
    num_tokens = max(0, kv_cache) // kv_token
    return RolloutPlan(
        share=share,
        weights=weights,
        workspace=workspace,
        kv_cache=kv_cache,
        kv_token=kv_token,
        num_cached_tokens=num_tokens,
        num_full_sequences=num_tokens // row_length,
        max_num_seqs=rollout.max_num_seqs,
    )


@lru_cache(maxsize=16)
def rollout_weight_elements(tensor_parallel: int, spec: KnownRules, dims: ModelDims) -> int:
    """Return the elements of one device's weights; cached, since the search asks for every layout."""
    return weight_elements(spec.rules(dims), dims, tensor_parallel)


def kv_token_bytes(rollout: RolloutSection, dims: ModelDims) -> int:
    """Return the bytes that one token takes in a device's KV cache, over all layers."""
    return dims.cached_numbers(rollout.tensor_parallel) * ELEMENT_BYTES[rollout.dtype]
