"""Speculative decoding in vLLM's CPU engine: who guesses, and how guesses are checked so that nothing changes.

Number ``t`` of a sample's random stream decides its token at position ``t`` (``sampling.py``), whatever was guessed.
So a guess is right when it is the token that would have been sampled there without guesses, and the samples are those
of plain decoding, up to rounding in the kernels; no acceptance by chance is needed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mindrlhf.cpu.rollout.drafts import GroupDrafts, num_drafted, num_kept
from mindrlhf.cpu.rollout.sampler import NO_TOKEN, StreamSampler, divisor, draw, of_rows, probabilities
from mindrlhf.cpu.rollout.sampling import uniforms


class GroupDrafter:
    """What vLLM calls after each step for guesses ("custom_class" of its speculative methods).

    Attributes:
        counts: how many tokens were guessed since the start ("drafted") and how many of them rightly ("accepted").
    """

    def __init__(self, config: VllmConfig):
        self._max_tokens = config.speculative_config.num_speculative_tokens
        self._num_slots = config.scheduler_config.max_num_seqs
        self._model_runner = None
        self._drafts: list[GroupDrafts] = []  # by group
        self._groups: dict[str, GroupDrafts] = {}  # by sample
        self.counts = {"drafted": 0, "accepted": 0}

    def attach(self, model_runner) -> None:
        """Learn whose rows are asked about; and guess also while a sample is near its last position, where vLLM would
        check zeros instead (its scheduler cuts guesses beyond that position off)."""
        self._model_runner = model_runner
        model_runner._input_fits_in_drafter = lambda attention: attention is not None

    def begin_batch(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget all samples; those to come are of groups with these prompts."""
        self._drafts = [GroupDrafts(prompt) for prompt in prompts]
        self._groups.clear()

    def add(self, name: str, group: int) -> None:
        """Sample ``name`` is of group number ``group``."""
        self._groups[name] = self._drafts[group]

    def load_model(self, model: torch.nn.Module) -> None:
        """vLLM's; there is none to load."""

    def propose(self, sampled_token_ids: list[list[int]], *_arguments, **_options) -> list[list[int]]:
        """Guesses for each row of vLLM's batch, which has just got ``sampled_token_ids``: none while it reads its
        prompt."""
        names = self._model_runner.input_batch.req_ids
        rows = [(self._groups[name], name, tokens) for name, tokens in zip(names, sampled_token_ids)]
        for group, name, tokens in rows:
            group.extend(name, tokens)
        count = num_drafted(self._max_tokens, len(names), self._num_slots)
        return [group.guess(name, count) if tokens and count else [] for group, name, tokens in rows]


class GuessChecker:
    """Takes the place of vLLM's rejection sampler: samples at all positions, keeps those up to the first wrong guess.

    Args:
        counts: of ``GroupDrafter``; what is checked is counted there.
    """

    def __init__(self, sampler: StreamSampler, counts: dict[str, int]):
        self._sampler = sampler
        self._counts = counts

    def __call__(
        self,
        guesses: SpecDecodeMetadata,
        _guess_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        nums_rows = np.asarray(guesses.num_draft_tokens) + 1
        ends = np.cumsum(nums_rows)
        streams, positions = self._sampler.places()
        keys = np.repeat(np.array([stream.key for stream in streams], np.uint64), nums_rows)
        within = np.arange(ends[-1]) - np.repeat(ends - nums_rows, nums_rows)
        row_positions = (np.repeat(positions, nums_rows) + within).astype(np.uint64)
        metadata = of_rows(sampling_metadata, np.repeat(np.arange(len(nums_rows)), nums_rows))
        probs = probabilities(logits, metadata, divisor(metadata))
        token_ids, logprobs = draw(probs, uniforms(keys, row_positions), sampling_metadata.all_greedy)
        guessed = guesses.draft_token_ids.tolist()
        kept = np.full((len(nums_rows), int(nums_rows.max())), NO_TOKEN, np.int32)
        for index, (stream, position) in enumerate(zip(streams, positions)):
            # Each sample before this one has a row more than guesses.
            row = int(ends[index] - nums_rows[index])
            own = guessed[row - index : int(ends[index]) - index - 1]
            limit = len(stream.token_ids) - position
            count = num_kept(token_ids[row : ends[index]].tolist(), own, stream.stop_token_ids, limit)
            if stream.stops is not None:
                count = stream.take(token_ids[row : row + count].tolist(), position)
            stream.length = position + count
            stream.token_ids[position : stream.length] = token_ids[row : row + count]
            stream.logprobs[position : stream.length] = logprobs[row : row + count]
            kept[index, :count] = token_ids[row : row + count]
            self._counts["drafted"] += len(own)
            self._counts["accepted"] += count - 1
        return SamplerOutput(sampled_token_ids=torch.from_numpy(kept), logprobs_tensors=None)
