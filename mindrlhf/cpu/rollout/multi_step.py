"""Several tokens of each sample between two looks of vLLM's scheduler.

vLLM plans every token: which samples go on, with which blocks of the cache, from which inputs. Of a small model that
costs half as much as the model itself. While no sample can begin and each has read its prompt, the plan of the next
token is that of this one but for a position; so the scheduler is asked for the blocks of several tokens at once (as for
speculative decoding, ``num_lookahead_tokens``), and the model runs until they are full. Then vLLM takes the tokens
like accepted drafts. A sample that ends leaves the batch of a dense model, and the others go on in the order that vLLM
would have given them; where another waits for its place, or the model is not dense, the step ends. Each pass has the
inputs that it would have had, so samples are the same bit for bit, however many tokens a step has.

Counts of tokens decide where a step ends, never clocks. One that is interrupted is taken up by the next where it was,
in the blocks that it has; and what vLLM enters in its prefix cache are prompts alone, since of sampled tokens it would
enter those of blocks that are full when it plans.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from mindrlhf.cpu.rollout.dense import DenseDecoder
from mindrlhf.cpu.rollout.sampler import StreamSampler
from mindrlhf.cpu.rollout.shared_prefill import SharedPrefill

# Of a step. More would gain little.
MAX_TOKENS = 64
# Passes that a sample which has ended waits for the end of the step, so that its reward is computed beside the others.
MAX_DELAY = 16


class MultiStep:
    """Runs the steps of an engine core that has the sampler, in one process.

    Args:
        core: vLLM's engine core.
        model_runner: its only one, of its first version.
        sampler: in its place in the model runner.
    """

    def __init__(self, core: Any, model_runner: Any, sampler: StreamSampler):
        self._core, self._scheduler = core, core.scheduler
        self._runner, self._sampler = model_runner, sampler
        self._max_tokens = MAX_TOKENS if _is_plain(model_runner) else 1
        self._is_dense = self._max_tokens > 1 and DenseDecoder.supports(model_runner.get_model())
        self._decoder: DenseDecoder | None = None  # of this step
        self._left = self._num_more = 0  # passes of this step after the one that vLLM plans: to come, and done
        self._unfinished = 0  # passes of one that was interrupted
        self._is_interrupted: Callable[[], bool] = lambda: False
        self._others_wait = False  # for places in the batch
        self._names: list[str] = []  # of the samples of the next pass, in its order
        self._departures: list[list[str]] = []  # names of those that ended before the step did, by token
        if self._max_tokens == 1:
            return
        sampler.decode = self._decode
        self._scheduler._update_request_with_output = self._take_tokens
        self._prefill: SharedPrefill | None = None
        if self._is_dense:  # a recorder of experts would miss what is not read
            self._prefill = SharedPrefill(core.scheduler, model_runner.get_model())
        coordinator = self._scheduler.kv_cache_manager.coordinator
        self._cache_blocks, coordinator.cache_blocks = coordinator.cache_blocks, self._cache_prompt
        # What the last pass that vLLM planned ran with.
        self._attention: CommonAttentionMetadata | None = None
        self._context: ForwardContext | None = None
        self._inputs: dict[str, Any] = {}
        builder = model_runner.attn_groups[0][0].get_metadata_builder()
        self._build, builder.build = builder.build, self._build_and_keep
        self._forward, model_runner._model_forward = model_runner._model_forward, self._forward_and_keep

    def step(self, is_interrupted: Callable[[], bool]) -> dict[int, Any]:
        """Run the model for one token or several of each running sample; return vLLM's outputs by client.

        It is asked between two tokens whether to end before the others.
        """
        max_tokens = self._room() if self._max_tokens > 1 and not self._sampler.is_masked else 1
        self._left, self._num_more, self._unfinished = max_tokens - 1, 0, 0
        self._is_interrupted, self._decoder = is_interrupted, None
        self._sampler.num_planned = max_tokens
        if self._is_dense:
            self._prefill.begin()
        self._scheduler.num_lookahead_tokens += max_tokens - 1
        try:
            outputs, model_executed = self._core.step_fn()
        finally:
            self._scheduler.num_lookahead_tokens -= max_tokens - 1
            self._left = 0
        # vLLM counts the token that it planned. Where there are more, all that still run took part.
        for request in self._scheduler.running if self._num_more else ():
            request.num_computed_tokens += self._num_more
        self._tell_departures()
        self._core.post_step(model_executed=model_executed)
        return outputs

    def _room(self) -> int:
        """Return the number of tokens that each running sample can get before vLLM has to plan again."""
        scheduler = self._scheduler
        running = scheduler.running
        self._others_wait = any(scheduler.get_request_counts()[1:])
        if not running or (self._others_wait and len(running) < scheduler.max_num_running_reqs):
            return 1
        if any(request.num_tokens - request.num_computed_tokens != 1 for request in running):  # of a prompt, to be read
            return 1
        if self._unfinished:
            return self._unfinished
        rooms = [
            min(request.max_tokens - request.num_output_tokens, scheduler.max_model_len - request.num_tokens)
            for request in running
        ]
        # A dense model goes on without those that reach their limit. A place that somebody waits for is not kept.
        room = max(rooms) if self._is_dense and not self._others_wait else min(rooms)
        # Where blocks are short, vLLM chooses who has to wait for them.
        num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() // len(running)
        return max(1, min(self._max_tokens, room, (num_free - 1) * scheduler.block_size - 1))

    def _take_tokens(self, request: Request, token_ids: list[int], is_stale: bool = False) -> tuple[list[int], bool]:
        """Give a request the tokens of a step, of which only the last can end it; vLLM looks at each."""
        if not token_ids:
            return token_ids, False
        request.append_output_token_ids(token_ids)
        return token_ids, check_stop(request, self._scheduler.max_model_len)

    def _cache_prompt(self, request: Request, num_tokens: int) -> None:
        """Enter the full blocks of a request's prompt, of its first ``num_tokens``, in the prefix cache."""
        self._cache_blocks(request, min(num_tokens, request.num_prompt_tokens))

    def _decode(self, token_ids: np.ndarray, ended: np.ndarray) -> tuple[torch.Tensor | None, np.ndarray | None]:
        """Run the model on the tokens, int64 [samples], that were sampled last.

        Args:
            ended: bool [samples], true for a sample that its token ended.

        Returns:
            Logits [samples that go on, vocab], or None, where vLLM has to plan again; and the numbers of these
            samples, int64 [samples that go on], or None, where all go on.
        """
        kept = None
        if ended.any():
            if not self._is_dense or self._others_wait or ended.all():
                return None, None
            self._left = min(self._left, MAX_DELAY)
        if not self._left:
            return None, None
        if self._is_interrupted():
            self._unfinished = self._left
            return None, None
        if ended.any():
            kept = order_of_the_rest(ended)
            self._leave(ended, kept)
            token_ids = token_ids[kept]
        self._left -= 1
        self._num_more += 1
        inputs, attention = self._inputs, self._attention
        inputs["input_ids"].copy_(torch.from_numpy(token_ids))
        inputs["positions"].add_(1)
        attention.seq_lens.add_(1)
        # vLLM's own call of it goes through what starts kernels of GPUs.
        torch.ops._C.compute_slot_mapping_kernel_impl.default(
            attention.query_start_loc, inputs["positions"], attention.block_table_tensor, attention.slot_mapping,
            self._runner.input_batch.block_table[0].block_size,
        )  # fmt: skip
        seen = self._build(0, attention)
        if self._is_dense:
            self._decoder = self._decoder or DenseDecoder(self._runner.get_model())
            return self._decoder(inputs["input_ids"], inputs["positions"], seen), kept
        self._context.attn_metadata = dict.fromkeys(self._context.attn_metadata, seen)
        self._context.moe_layer_index = 0
        with override_forward_context(self._context):
            return self._runner.model.compute_logits(self._forward(**inputs)), None

    def _leave(self, ended: np.ndarray, kept: np.ndarray) -> None:
        """Make the inputs those of the samples ``kept``, in that order."""
        self._departures.append([name for name, is_last in zip(self._names, ended.tolist(), strict=True) if is_last])
        self._names = [self._names[row] for row in kept]
        rows, num_rows, attention = torch.from_numpy(kept), len(kept), self._attention
        self._inputs = {name: self._inputs[name][rows] for name in ("input_ids", "positions")}
        self._attention = dataclasses.replace(
            attention,
            num_reqs=num_rows,
            num_actual_tokens=num_rows,
            query_start_loc=attention.query_start_loc[: num_rows + 1],
            seq_lens=attention.seq_lens[rows],
            block_table_tensor=attention.block_table_tensor[rows],
            slot_mapping=attention.slot_mapping[:num_rows].clone(),
        )

    def _tell_departures(self) -> None:
        """Have vLLM's batch in the order of the last pass: vLLM would take all that left at once, in another."""
        batch = self._runner.input_batch
        for names in self._departures:
            for name in names:
                batch.remove_request(name)
            batch.condense()
            batch.refresh_metadata()
        self._departures.clear()

    def _build_and_keep(self, common_prefix_len: int, attention: CommonAttentionMetadata, *args: Any, **kwargs: Any):
        self._attention = attention
        return self._build(common_prefix_len, attention, *args, **kwargs)

    def _forward_and_keep(self, **inputs: Any):
        self._context, self._inputs = get_forward_context(), inputs
        self._names = list(self._runner.input_batch.req_ids)
        hidden = self._forward(**inputs)
        if self._prefill is not None:
            self._prefill.spread(hidden, self._names, self._attention)
        return hidden


def order_of_the_rest(ended: np.ndarray) -> np.ndarray:
    """Return the samples that go on, int64, in the order of vLLM's batch without those that ended, bool [samples].

    Each gap is filled with the sample that is last (``InputBatch.condense`` of vLLM).
    """
    num_kept = len(ended) - int(ended.sum())
    order = np.arange(num_kept)
    order[ended[:num_kept]] = (num_kept + np.flatnonzero(~ended[num_kept:]))[::-1]
    return order


def _is_plain(model_runner: Any) -> bool:
    """Return whether inputs are tokens and positions, and the state keys and values in one kind of blocks."""
    groups = model_runner.kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and type(groups[0].kv_cache_spec) is FullAttentionSpec
        and len(model_runner.attn_groups[0]) == 1
        and not (model_runner.uses_mrope or model_runner.supports_mm_inputs or model_runner.use_async_scheduling)
    )
