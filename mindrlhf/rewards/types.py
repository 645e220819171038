"""Request and result records of verifiers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindrlhf.system.records import record


@dataclass(frozen=True)
class RewardInput:
    """One completion to be scored. ``index`` is the caller's own name for it and comes back in the result."""

    index: int
    completion: str
    answer: str  # the reference answer
    prompt: str = ""
    finish_reason: str = "stop"  # "stop" or "length"
    num_tokens: int = 0  # response tokens, stop token included
    verifiers: tuple[str, ...] = ()  # names of the chosen verifiers, for those that apply by choice only
    completions: tuple[str, ...] = ()  # of all samples of the prompt, for verifiers that compare them
    episode_return: float | None = None  # sum of an environment's rewards; NaN where it broke down; None without one
    turn_texts: tuple[str, ...] = ()  # of the model's turns, for verifiers that read them
    token_texts: tuple[str, ...] = ()  # of the tokens that the model wrote, for verifiers that read them
    extra: Mapping[str, Any] = field(default_factory=dict)  # kept columns of the prompt, JSON values by name


@record
@dataclass(frozen=True)
class RewardResult:
    """The rewards of one completion."""

    index: int
    parts: dict[str, float]  # by name of the verifiers that apply to the prompt, unweighted
    total: float  # sum of weight * part; NaN where it is unscored
    failures: dict[str, str] = field(default_factory=dict)  # reason, by name of the verifier that gave no value
    # What makes up a part, by name of a verifier that rewards each turn, or each token that the model wrote.
    steps: dict[str, list[float]] = field(default_factory=dict)
    unscored: str = ""  # why nothing is known of the sample, by no fault of it: it leaves its group and the loss
