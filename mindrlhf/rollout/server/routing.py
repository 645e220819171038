"""Experts that vLLM routed each token to, kept beside its key-value cache.

A token's row has the number of its slot in the cache. So tokens that a request finds in the cache, because another had
the same prefix, have theirs too. vLLM's own way to return them is in its newer model runner, which needs a GPU.
"""

import functools

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner

from mindrlhf.rollout.types import experts_dtype


class RoutingRecorder:
    """Records the experts of every token of one process.

    Args:
        model_runner: vLLM's, of its first version, with its cache.

    Raises:
        ValueError: the model has no experts.
    """

    def __init__(self, model_runner):
        routers = [module for module in model_runner.get_model().modules() if isinstance(module, MoERunner)]
        if not routers:
            raise ValueError("the model has no experts whose routing could be recorded")
        self._requests = model_runner.requests
        self._block_size = model_runner.input_batch.block_table[0].block_size
        num_slots = model_runner.kv_cache_config.num_blocks * self._block_size
        num_experts, num_active = routers[0].router.global_num_experts, routers[0].router.top_k
        self._experts = np.zeros((num_slots, len(routers), num_active), experts_dtype(num_experts))
        for place, runner in enumerate(sorted(routers, key=lambda runner: runner.layer_id)):
            runner.router.set_capture_fn(functools.partial(self._record, place))

    def experts_of(self, request_id: str, num_tokens: int) -> np.ndarray:
        """Return the experts of a request's first tokens, uint8 or uint16 [tokens, layers with experts, active].

        It must have been in the last step: then nothing else has its slots yet, even if it ended there.
        """
        blocks = np.asarray(self._requests[request_id].block_ids[0], np.int64)
        slots = (blocks[:, None] * self._block_size + np.arange(self._block_size)).ravel()
        return self._experts[slots[:num_tokens]]

    def _record(self, place: int, topk_ids: torch.Tensor) -> None:
        slots_by_layer = get_forward_context().slot_mapping
        if not slots_by_layer:  # vLLM measures its memory with tokens that nobody asked for
            return
        slots = next(iter(slots_by_layer.values()))[: len(topk_ids)].numpy()
        is_kept = slots >= 0
        self._experts[slots[is_kept], place] = topk_ids[: len(slots)].numpy()[is_kept]
