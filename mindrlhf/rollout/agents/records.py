"""What a checkpoint keeps of an agent's episode that goes on."""

from dataclasses import dataclass

import numpy as np

from mindrlhf.rollout.types import Completion
from mindrlhf.system.records import record


@record
@dataclass(frozen=True)
class GivenSample:
    """What the generator has given, so far, to a call of an agent: run anew after a resumption, it gets it again."""

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
