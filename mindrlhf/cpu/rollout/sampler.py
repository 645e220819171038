"""Takes the place of vLLM's sampler on a CPU: tokens by ``mindrlhf.cpu.rollout.sampling``, several at a time."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from mindrlhf.cpu.rollout.sampling import sample_rows, uniforms
from mindrlhf.rollout.stop_strings import StopStrings

NO_TOKEN = -1  # vLLM takes it for a place without one


@dataclass
class Stream:
    """A sample in the making: the key of its random stream, and what was sampled so far.

    Attributes:
        begun: tokens of the response before those of the stream.
        stopped_at: how many tokens it has when a stop string ends it; 0 while none does.
    """

    key: int
    token_ids: np.ndarray  # int32 [max_tokens]
    logprobs: np.ndarray  # float32 [max_tokens]
    length: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stops: StopStrings | None = None
    begun: list[int] = dataclasses.field(default_factory=list)
    stopped_at: int = 0

    def take(self, token_ids: list[int], position: int) -> int:
        """Store sampled tokens, and return how many of them are the sample's: up to one that ends a stop string."""
        end = position + len(token_ids)
        self.token_ids[position:end] = token_ids
        self.stopped_at = 0
        if any(map(self.stops.may_end, token_ids)):
            count = self.stops.first_end([*self.begun, *self.token_ids[:end].tolist()], len(token_ids))
            self.stopped_at = position + count if count >= 0 else 0
        return self.stopped_at - position if self.stopped_at else len(token_ids)


class StreamSampler(torch.nn.Module):
    """Takes the place of vLLM's sampler in the model runner.

    ``streams`` maps vLLM's request ids to their ``Stream``. Tokens and log-probabilities are stored by position, so
    a token that vLLM discards (the last row of an unfinished prompt chunk) is overwritten by the one that counts.

    Attributes:
        decode: what ``MultiStep`` makes of the tokens, int64 [samples], that were just sampled, and of which of their
            samples they end, bool [samples]: logits of the next tokens, float32 [samples that go on, vocab], and which
            those are, int64 [samples that go on], or None for all; None, where the tokens are the last of vLLM's step.
        num_planned: the most tokens of each sample that vLLM's step may have.
    """

    def __init__(self, model_runner):
        super().__init__()
        self.streams: dict[str, Stream] = {}
        self.decode: Callable[[np.ndarray, np.ndarray], tuple[torch.Tensor, np.ndarray | None] | None] = _end_step
        self.num_planned = 1
        self._requests = model_runner.requests
        self._input_batch = model_runner.input_batch

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        streams, starts = self.places()
        keys, positions = np.array([stream.key for stream in streams], np.uint64), np.array(starts, np.uint64)
        limits = np.array([len(stream.token_ids) - start for stream, start in zip(streams, starts)])
        (stops,) = {stream.stop_token_ids for stream in streams}  # a batch has one sampling
        draws = uniforms(keys[:, None], positions[:, None] + np.arange(self.num_planned, dtype=np.uint64))
        rows, metadata, temperature = np.arange(len(streams)), sampling_metadata, divisor(sampling_metadata)
        drawn = []
        while True:
            probs = probabilities(logits, metadata, temperature)
            tokens, values = draw(probs, draws[rows, len(drawn)], metadata.all_greedy)
            drawn.append((rows, tokens, values))
            ended = limits[rows] <= len(drawn)
            if not stops.isdisjoint(tokens.tolist()):
                ended |= np.isin(tokens, list(stops))
            if streams[0].stops is not None:
                for place, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist())):
                    streams[row].take([token], starts[row] + len(drawn) - 1)
                    ended[place] |= streams[row].stopped_at > 0
            more = self.decode(tokens, ended)
            if more is None:
                return SamplerOutput(sampled_token_ids=_store(drawn, streams, starts), logprobs_tensors=None)
            logits, kept = more
            if kept is not None:
                rows = rows[kept]
                metadata = of_rows(sampling_metadata, rows)
                temperature = divisor(metadata)

    def places(self) -> tuple[list[Stream], list[int]]:
        """The streams of vLLM's batch, in its order, and the position of the next token in each."""
        names = self._input_batch.req_ids
        return [self.streams[name] for name in names], [len(self._requests[name].output_token_ids) for name in names]


def _end_step(token_ids: np.ndarray, ended: np.ndarray) -> None:
    """The ``decode`` of a sampler that has none: vLLM plans every token."""


def _store(
    drawn: list[tuple[np.ndarray, np.ndarray, np.ndarray]], streams: list[Stream], starts: list[int]
) -> torch.Tensor:
    """Give each stream its rows, tokens and log-probabilities of a step.

    Returns:
        What vLLM takes, int32 [samples, tokens], ``NO_TOKEN`` where a sample had ended.
    """
    token_ids = np.full((len(streams), len(drawn)), NO_TOKEN, np.int32)
    logprobs = np.empty(token_ids.shape, np.float32)
    lengths = np.zeros(len(streams), np.int64)
    for number, (rows, tokens, values) in enumerate(drawn):
        token_ids[rows, number], logprobs[rows, number] = tokens, values
        lengths[rows] = number + 1
    for stream, start, length, tokens, values in zip(streams, starts, lengths.tolist(), token_ids, logprobs):
        stream.length = start + length
        stream.token_ids[start : stream.length] = tokens[:length]
        stream.logprobs[start : stream.length] = values[:length]
    return torch.from_numpy(token_ids)


def of_rows(metadata: SamplingMetadata, rows: np.ndarray) -> SamplingMetadata:
    """The parameters of samples as those of rows, int64 [rows], each one of a sample."""
    index = torch.from_numpy(rows)
    per_sample = {name: getattr(metadata, name) for name in ("temperature", "top_k", "top_p")}
    taken = {name: None if value is None else value[index] for name, value in per_sample.items()}
    return dataclasses.replace(metadata, **taken)


def draw(probs: torch.Tensor, draws: np.ndarray, is_greedy: bool) -> tuple[np.ndarray, np.ndarray]:
    """Sample from each row of ``probs``, float32 [rows, vocab], by a number in [0, 1), float64 [rows].

    Returns:
        Token ids int64 [rows] and their log-probabilities float32 [rows].
    """
    if is_greedy:
        token_ids = probs.argmax(dim=-1).numpy()
        return token_ids, np.log(np.take_along_axis(probs.numpy(), token_ids[:, None], axis=1)[:, 0])
    return sample_rows(probs.numpy(), draws)


def divisor(metadata: SamplingMetadata) -> torch.Tensor | None:
    """Divisors of logits before their softmax, float32 [rows, 1]; None where that is 1."""
    if metadata.all_greedy:
        return None
    assert metadata.all_random, "one batch has one temperature"
    return None if bool((metadata.temperature == 1.0).all()) else metadata.temperature.unsqueeze(1)


def probabilities(logits: torch.Tensor, metadata: SamplingMetadata, temperature: torch.Tensor | None) -> torch.Tensor:
    """The distribution to sample from, float32 [rows, vocab]: temperature first, then top-k and top-p, as vLLM does."""
    logits = logits.to(torch.float32)
    if temperature is not None:
        logits = logits.div_(temperature)
    if not metadata.all_greedy:
        logits = apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
    return logits.softmax(dim=-1)
