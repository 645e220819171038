"""Checkpoint records of unfinished agent episodes."""

from dataclasses import dataclass

import numpy as np

from mindrlhf.rollout.types import Completion
from mindrlhf.system.records import record


@record
@dataclass(frozen=True)
class GivenSample:
    """Tokens generated so far for one call of an agent, replayed to it after a resumption."""

    digest: str  # of what was asked
    number: int  # among the calls that asked the same
    sample: int  # among those of the call
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    finish_reason: str  # "" while it is not complete
    spans: tuple[tuple[int, int], ...]  # as ``Completion.spans``


@record
@dataclass(frozen=True)
class EpisodeUnderWay(Completion):
    """The beginning of an episode in partial rollout; it has no tokens but those that its calls were given."""

    given: tuple[GivenSample, ...] = ()
