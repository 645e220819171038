"""One reading of a prompt for the samples of it that begin in one pass of the model.

vLLM's prefix cache has whole blocks of 32 tokens. What a prompt has behind its last whole block is read for each sample
again: of 8 samples of 45 tokens 104 in place of 13. Here the first sample of a prompt in a pass reads it, and the
others bring their last token only. Their hidden states are then replaced by those of the first, and its last block is
copied into theirs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.request import Request

# Multiplications from which on it pays for a sample: its blocks are copied in each layer.
LEAST_SAVED = 1 << 28


class SharedPrefill:
    """Takes part in the planning of an engine core's scheduler, and in the passes of its model runner.

    Args:
        scheduler: with one kind of blocks.
        model: whose inputs are tokens and positions alone.
    """

    def __init__(self, scheduler: Any, model: torch.nn.Module):
        manager = scheduler.kv_cache_manager
        self._find, manager.get_computed_blocks = manager.get_computed_blocks, self._find_or_share
        (blocks_of_requests,) = manager.coordinator.single_type_managers
        # To vLLM a prefix that ends within a block is one of its cache, whose last block it would copy by itself.
        blocks_of_requests._has_partial_local_hit = lambda *arguments: False
        self._block_size, self._model = scheduler.block_size, model
        self._num_weights = sum(layer.weight.numel() for layer in model.modules() if hasattr(layer, "cpu_linear"))
        self.begin()

    def begin(self) -> None:
        """Forget what was planned: a pass is planned from now on."""
        self._readers: dict[tuple[int, ...], str] = {}  # names of the samples that read a prompt, by its tokens
        self._sharers: dict[str, str] = {}  # names of others, and whose prompt they have

    def _find_or_share(self, request: Request) -> tuple[Any, int, int]:
        """Take the place of ``KVCacheManager.get_computed_blocks``."""
        blocks, num_computed, boundary = self._find(request)
        if request.num_output_tokens:
            return blocks, num_computed, boundary
        reader = self._readers.setdefault(tuple(request.prompt_token_ids), request.request_id)
        last = request.num_tokens - 1
        saved = (last - num_computed) * self._num_weights
        is_in_one_block = num_computed == last // self._block_size * self._block_size
        if reader == request.request_id or not is_in_one_block or saved < LEAST_SAVED:
            return blocks, num_computed, boundary
        self._sharers[request.request_id] = reader
        return blocks, last, boundary

    def spread(self, hidden: torch.Tensor, names: Sequence[str], attention: CommonAttentionMetadata) -> None:
        """Give those that share a prompt what the pass has made of it.

        Args:
            hidden: of the pass, [tokens, hidden], changed in place.
            names: of its samples, in order.
            attention: of the same samples.
        """
        rows = {name: row for row, name in enumerate(names)}
        pairs = [(rows[name], rows[reader]) for name, reader in self._sharers.items() if name in rows]
        self.begin()
        if not pairs:
            return
        sharers, readers = torch.tensor(pairs).unbind(1)
        ends = attention.query_start_loc[1 : len(names) + 1].long() - 1
        hidden[ends[sharers]] = hidden[ends[readers]]
        columns = (attention.seq_lens[readers].long() - 1) // self._block_size
        table = attention.block_table_tensor
        to, of = table[sharers, columns].long(), table[readers, columns].long()
        for layer in self._model.modules():
            if hasattr(layer, "kv_cache"):
                layer.kv_cache[to] = layer.kv_cache[of]
