"""Takes the place of vLLM's sampler on a CPU: tokens by ``mindrlhf.cpu.rollout.sampling``, several at a time."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from mindrlhf.cpu.rollout.sampling import sample_rows

_NO_TOKEN = -1  # vLLM takes it for a place without one


@dataclass
class Stream:
    """A sample in the making: the key of its random stream, and what was sampled so far.

    Attributes:
        stops: :class:`mindrlhf.rollout.stop_strings.StopStrings`; None where the batch has none.
        begun: tokens of the response before those of the stream.
        is_stopped: a stop string ends with the last token.
    """

    key: int
    token_ids: np.ndarray  # int32 [max_tokens]
    logprobs: np.ndarray  # float32 [max_tokens]
    length: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stops: Any = None
    begun: list[int] = dataclasses.field(default_factory=list)
    is_stopped: bool = False

    def take(self, token_id: int, logprob: float, position: int) -> bool:
        """Store a sampled token; return True where it ends the sample."""
        self.token_ids[position], self.logprobs[position] = token_id, logprob
        self.length = position + 1
        self.is_stopped = (
            self.stops is not None
            and self.stops.may_end(token_id)
            and self.stops.is_complete([*self.begun, *self.token_ids[: self.length].tolist()])
        )
        return self.is_stopped or self.length == len(self.token_ids) or token_id in self.stop_token_ids


class StreamSampler(torch.nn.Module):
    """Takes the place of vLLM's sampler in the model runner.

    ``streams`` maps vLLM's request ids to their ``Stream``. Tokens and log-probabilities are stored by position, so
    a token that vLLM discards (the last row of an unfinished prompt chunk) is overwritten by the one that counts.

    Args:
        model_runner: of vLLM, of its first version.
        uniforms: numbers in [0, 1) by the keys of streams and positions in them.

    Attributes:
        decode: what ``MultiStep`` makes of the tokens, int64 [samples], that were just sampled, and of which samples
            they ended, bool [samples]: logits of the next tokens, float32 [samples that go on, vocab], or None, where
            they are the last of vLLM's step; and the numbers of these samples, None for all.
        num_planned: the most tokens of each sample that vLLM's step may have.
        is_masked: the batch follows a grammar, which knows one token at a time.
    """

    def __init__(self, model_runner: Any, uniforms: Callable[[np.ndarray, np.ndarray], np.ndarray]):
        super().__init__()
        self._uniforms = uniforms
        self.streams: dict[str, Stream] = {}
        self.decode: Callable[..., tuple[torch.Tensor | None, np.ndarray | None]] = lambda *sampled: (None, None)
        self.num_planned = 1
        self.is_masked = False
        self._requests = model_runner.requests
        self._input_batch = model_runner.input_batch

    def forward(
        self,
        logits: torch.Tensor | None,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        names = self._input_batch.req_ids
        streams = [self.streams[name] for name in names]
        starts = [len(self._requests[name].output_token_ids) for name in names]
        keys, positions = np.array([stream.key for stream in streams], np.uint64), np.array(starts, np.uint64)
        draws = self._uniforms(keys[:, None], positions[:, None] + np.arange(self.num_planned, dtype=np.uint64))
        temperature = divisor(sampling_metadata)
        rows, metadata, drawn = np.arange(len(streams)), sampling_metadata, []
        while logits is not None:
            if self.is_masked:
                logits = logits.to(torch.float32)
                for processor in metadata.logitsprocs.non_argmax_invariant:
                    logits = processor.apply(logits)
            probs = probabilities(logits, metadata, temperature)
            tokens, values = draw(probs, draws[rows, len(drawn)], metadata.all_greedy)
            taken = zip(rows.tolist(), tokens.tolist(), values.tolist(), strict=True)
            ended = [streams[row].take(token, value, starts[row] + len(drawn)) for row, token, value in taken]
            drawn.append((rows, tokens))
            logits, kept = self.decode(tokens, np.array(ended))
            if kept is not None:
                rows = rows[kept]
                metadata = of_rows(sampling_metadata, rows)
                temperature = divisor(metadata)
        sampled = np.full((len(streams), len(drawn)), _NO_TOKEN, np.int32)
        for number, (rows, tokens) in enumerate(drawn):
            sampled[rows, number] = tokens
        return SamplerOutput(sampled_token_ids=torch.from_numpy(sampled), logprobs_tensors=None)


def of_rows(metadata: SamplingMetadata, rows: np.ndarray) -> SamplingMetadata:
    """Return the parameters of some rows, int64 [rows]."""
    index = torch.from_numpy(rows)
    per_row = {name: getattr(metadata, name) for name in ("temperature", "top_k", "top_p")}
    taken = {name: None if value is None else value[index] for name, value in per_row.items()}
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
