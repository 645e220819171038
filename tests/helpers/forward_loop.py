"""A generator on the training cells: slow, without vLLM, and simple enough to check vLLM against."""

from collections.abc import Iterator, Sequence

import mindspore as ms
import numpy as np
from causal_logits import CausalLMLogits
from networks import set_tensors

from mindrlhf.errors import UserError
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.tensors import convert_dtype


class ForwardLoopGenerator:
    """One full forward pass of fixed shape per token; no key-value cache.

    Args:
        model: a model of its own (not the trained one), whose weights the buffer replaces.
        row_length: prompt and response together may have this many tokens.
        num_rows: sequences decoded at once.
    """

    def __init__(self, model: CausalLM, *, row_length: int, num_rows: int):
        self._model = model
        self._logits = CausalLMLogits(model)
        self._logits.set_train(False)
        self._row_length = row_length
        self._num_rows = num_rows
        self._buffer: WeightBuffer | None = None
        self._version = 0

    def use_weight_buffer(self, path: str) -> None:
        """Map the weight buffer that ``update_weights`` reads."""
        self._buffer = WeightBuffer.attach(path)

    def update_weights(self, version: int) -> None:
        """Load the tensors of ``version`` from the buffer."""
        tensors = self._buffer.tensors(version)
        set_tensors(self._model, {name: convert_dtype(array, dtype, "float32") for name, dtype, array in tensors})
        self._version = version

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield the completions, a block of ``num_rows`` sequences at a time.

        Raises:
            UserError: a prompt leaves no room for ``sampling.max_tokens``.
        """
        for request in requests:
            max_tokens = request.token_limit(sampling)
            if len(request.prompt_ids) + max_tokens > self._row_length:
                raise UserError(
                    f"a prompt of {len(request.prompt_ids)} tokens and max_tokens {max_tokens} exceed the row "
                    f"of {self._row_length}: shorten one of them"
                )
        wanted = [(request, index) for request in requests for index in range(request.num_samples)]
        for start in range(0, len(wanted), self._num_rows):
            yield from self._decode(wanted[start : start + self._num_rows], sampling)

    def sleep(self) -> None:
        """Nothing to give back."""

    def wake(self) -> None:
        """Nothing to take."""

    def close(self) -> None:
        """Unmap the buffer."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _decode(self, block: Sequence[tuple[GenerationRequest, int]], sampling: SamplingParams) -> list[Completion]:
        ids = np.zeros((self._num_rows, self._row_length), np.int32)
        lengths = [len(request.prompt_ids) for request, _ in block]
        for row, (request, _) in enumerate(block):
            ids[row, : lengths[row]] = request.prompt_ids
        streams = [np.random.default_rng([request.seed, index]) for request, index in block]
        logprobs: list[list[float]] = [[] for _ in block]
        reasons = [""] * len(block)
        while not all(reasons):
            segments = np.zeros_like(ids)
            for row, length in enumerate(lengths):
                segments[row, :length] = 1
            logits = self._logits(ms.Tensor(ids), ms.Tensor(segments)).asnumpy()
            for row, length in enumerate(lengths):
                if reasons[row]:
                    continue
                token, logprob = sample_token(logits[row, length - 1], sampling, streams[row])
                ids[row, length] = token
                lengths[row] += 1
                logprobs[row].append(logprob)
                if token in sampling.stop_token_ids:
                    reasons[row] = "stop"
                elif len(logprobs[row]) == block[row][0].token_limit(sampling):
                    reasons[row] = "length"
        return [
            Completion(
                request_id=request.request_id,
                sample_index=index,
                token_ids=ids[row, len(request.prompt_ids) : lengths[row]].copy(),
                logprobs=np.asarray(logprobs[row], np.float32),
                finish_reason=reasons[row],
                weights_version=self._version,
            )
            for row, (request, index) in enumerate(block)
        ]


def sample_token(logits: np.ndarray, sampling: SamplingParams, stream: np.random.Generator) -> tuple[int, float]:
    """Sample one token and return it with its log-probability under the distribution it was sampled from.

    Args:
        logits: float32 [vocabulary].
        sampling: temperature 0 takes the likeliest token; top_k and top_p (Holtzman et al. 2020,
            arXiv:1904.09751, section 3.1) keep the likeliest tokens, at least one.
        stream: source of the one uniform number used.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, float(_log_softmax(logits.astype(np.float64))[token])
    logprobs = _log_softmax(logits.astype(np.float64) / sampling.temperature)
    order = np.argsort(-logprobs, kind="stable")
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass_before = np.cumsum(np.exp(_log_softmax(logprobs[kept]))) - np.exp(_log_softmax(logprobs[kept]))
    kept = kept[mass_before < sampling.top_p]
    chosen = _log_softmax(logprobs[kept])
    place = int(np.searchsorted(np.cumsum(np.exp(chosen)), stream.random(), side="right"))
    place = min(place, len(kept) - 1)  # rounding may leave the sum a hair below 1
    return int(kept[place]), float(chosen[place])


def _log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max()
    return shifted - np.log(np.exp(shifted).sum())
