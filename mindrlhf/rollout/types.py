"""The records that pass between trainer and generator, and the protocol every generator meets.

This module is imported by the rollout interpreter too, so it needs NumPy and nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. ``top_k`` 0 means no limit; ``max_tokens`` counts the stop token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be sampled ``num_samples`` times.

    ``prompt_ids`` hold as many image tokens for each of the ``images`` as it takes, in order.

    Sample ``i`` is sampled from a random stream that depends on ``seed`` and ``i`` only, so that the same
    request gives the same samples whatever else is in the batch (up to rounding in the kernels).
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    num_samples: int
    seed: int
    max_tokens: int = 0  # 0 leaves it to SamplingParams
    images: tuple[np.ndarray, ...] = ()  # uint8 [height, width, 3] each, of the size that the model sees
    answer: str = ""  # of the record; no generator reads it, an environment begins its episodes by it

    def token_limit(self, sampling: SamplingParams) -> int:
        """Return the most tokens that one sample may have."""
        return self.max_tokens or sampling.max_tokens


@dataclass(frozen=True)
class Completion:
    """One finished sample of a request; with tools, a whole conversation."""

    request_id: int
    sample_index: int
    token_ids: np.ndarray  # int32 [response], stop token included when finish_reason is "stop"
    logprobs: np.ndarray  # float32 [generated tokens], of the sampled (temperature-scaled) policy
    finish_reason: str  # "stop" or "length"
    weights_version: int  # version of the weights that produced it
    is_generated: np.ndarray | None = None  # bool [response], False where a tool wrote; None when no tool did
    num_turns: int = 1
    num_tool_calls: int = 0
    num_tool_failures: int = 0  # malformed calls among them
    num_neutralised_answers: int = 0  # of tools, that held control tokens
    spans: tuple[tuple[int, int], ...] = ()  # (version of the weights, tokens they generated); empty: one for all
    # uint8 or uint16 [prompt + response - 1, layers with experts, active experts]: where the generator sent each token
    # but the last, which it never read; None where it does not say.
    experts: np.ndarray | None = None
    episode_return: float | None = None  # sum of an environment's rewards; NaN where it broke down; None without one


class Cancelled(Exception):
    """Another thread has called ``cancel`` on the generator."""


class CompletionSource(Protocol):
    """Whatever completes prompts."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield every completion as it finishes: ``sum(r.num_samples)`` of them, in any order."""


class Generator(CompletionSource, Protocol):
    """A source of completions whose weights the trainer replaces between steps."""

    def update_weights(self, version: int) -> None:
        """Load the tensors that the weight buffer now holds and forget all cached prefixes."""

    def sleep(self) -> None:
        """Give the device memory back to the trainer (no-op on CPU)."""

    def wake(self) -> None:
        """Take device memory again; weights must be updated before the next ``generate``."""

    def cancel(self) -> None:
        """Have ``generate``, in the thread that consumes it, raise ``Cancelled`` within a second, now and later."""

    def close(self) -> None:
        """Stop every process and remove every socket that this generator made."""
