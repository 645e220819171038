"""The records that pass between trainer and generator, and the protocol every generator meets.

The rollout interpreter imports this module too, so it needs NumPy and nothing else.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.system.records import record


@record
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. ``top_k`` 0 means no limit; ``max_tokens`` counts the stop token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # texts: the token that completes one is the last, too
    grammar: str = ""  # a structural tag of xgrammar, as JSON, that a sample keeps to


@record
@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be sampled ``num_samples`` times.

    ``prompt_ids`` hold as many image tokens for each of the ``images`` as it takes, in order.

    Sample ``i`` has a random stream of ``seed`` and ``i`` only: the same whatever else is in the batch, up to rounding.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    num_samples: int
    seed: int
    max_tokens: int = 0  # 0 leaves it to SamplingParams
    images: tuple[np.ndarray, ...] = ()  # uint8 [height, width, 3] each, of the size that the model sees
    num_begun: int = 0  # last tokens of the prompt that are of the response already: stop strings may begin in them
    # Of the record, for tools and environments, and for the turns that follow; no generator reads them.
    answer: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)  # kept columns, JSON values by name
    # In partial rollout, for a source that ``continues``: the response so far, at the prompt's end, and its number.
    begun: "Completion | None" = None
    response: int = 0

    def token_limit(self, sampling: SamplingParams) -> int:
        return self.max_tokens or sampling.max_tokens


@record
@dataclass(frozen=True)
class OwnSequence:
    """Tokens that stood in one context: what an agent sent first, and what came of it."""

    prompt_ids: np.ndarray  # int32 [prompt]
    token_ids: np.ndarray  # int32 [response]
    is_generated: np.ndarray  # bool [response]
    role: str = ""  # the model that the agent named


@record
@dataclass(frozen=True)
class AgentRecord:
    """Record of an agent's episode, beside its tokens."""

    sequences: tuple[OwnSequence, ...]  # in the order of ``Completion.token_ids``, which are their responses
    text: str  # what it left, for verifiers
    failure: str = ""  # why it broke down
    num_other_tokens: int = 0  # turns whose text would have come back as other tokens
    num_rewritten: int = 0  # calls that told turns of the model which it has not written so
    num_refused: int = 0  # calls answered with an error
    num_unread: int = 0  # calls whose client had gone before it had the answer: they are left out
    rewards: Mapping[str, float] = field(default_factory=dict)  # of roles, where each has its own


@record
@dataclass(frozen=True)
class Completion:
    """One finished sample of a request; with tools, a whole conversation; of an agent, a whole episode."""

    request_id: int
    sample_index: int
    token_ids: np.ndarray  # int32 [response], stop token included when finish_reason is "stop"
    logprobs: np.ndarray  # float32 [generated tokens], of the sampled (temperature-scaled) policy
    finish_reason: str  # "stop" or "length"
    weights_version: int  # version of the weights that produced it
    # bool [response], False where a tool wrote, or a grammar (see ``server.grammars``); None when neither did.
    is_generated: np.ndarray | None = None
    num_turns: int = 1
    num_tool_calls: int = 0
    num_tool_failures: int = 0  # malformed calls among them
    num_malformed_calls: int = 0  # that could not be read
    num_neutralised_answers: int = 0  # of tools, that held control tokens
    spans: tuple[tuple[int, int], ...] = ()  # (version of the weights, tokens they generated); empty: one for all
    # uint8 or uint16 [prompt + response - 1, layers with experts, active experts]: where the generator sent each token
    # but the last, which it never read; None where it does not say.
    experts: np.ndarray | None = None
    episode_return: float | None = None  # sum of an environment's rewards; NaN where it broke down; None without one
    turn_rewards: tuple[tuple[int, float], ...] = ()  # of an environment: (tokens that the model wrote, reward) by turn
    agent: AgentRecord | None = None
    unscored: str = ""  # why it says nothing of the policy, by no fault of it: it is left out

    @property
    def turn_lengths(self) -> list[int]:
        """Tokens that the model wrote in each of its turns."""
        if self.turn_rewards or self.is_generated is None:
            return [length for length, _ in self.turn_rewards] or [len(self.token_ids)]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], self.is_generated.astype(np.int8), [0]])))
        return (edges[1::2] - edges[::2]).tolist()

    def sequences(self, prompt_ids: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        """Return prompt, response and what of it was generated, of each sequence of this sample of a prompt."""
        if self.agent is None:
            return [(prompt_ids, self.token_ids, self.is_generated)]
        return [(one.prompt_ids, one.token_ids, one.is_generated) for one in self.agent.sequences]


class WeightsReplaced(RunFailure):
    """A server was started again, and its weights are in the weight buffer no more."""


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


def experts_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """The smallest that also has a number which is no expert's: its largest says that the router is to choose."""
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16


def as_sent(request: GenerationRequest, sampling: SamplingParams) -> GenerationRequest:
    """Return what a server reads of a request, with its own limit of tokens."""
    return dataclasses.replace(
        request, max_tokens=request.token_limit(sampling), answer="", extra={}, begun=None, response=0
    )


def checked(completion: Completion, server: str) -> Completion:
    """Return a completion of a server; one with a log-probability that is not finite is not scored."""
    bad = np.flatnonzero(~np.isfinite(completion.logprobs))
    if not len(bad):
        return completion
    token = f"token {completion.token_ids[bad[0]]}, number {bad[0] + 1} of the response,"
    unscored = f"{server} gave {token} the log-probability {completion.logprobs[bad[0]]}"
    return dataclasses.replace(completion, unscored=unscored)
