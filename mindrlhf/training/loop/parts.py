"""What the loop works with, made by :mod:`mindrlhf.training.reinforcement`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindrlhf.evaluation.heldout import HeldOut
from mindrlhf.observe.fingerprint import FingerprintWriter
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.observe.timing import StageTimer
from mindrlhf.rollout.samples import Sampler
from mindrlhf.rollout.types import Generator
from mindrlhf.training.batch import RowOptions
from mindrlhf.training.loop.guards.all import Guards
from mindrlhf.training.loop.key_data import KeyData
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.prompts import PromptSampling
from mindrlhf.training.team import Team


@dataclass(frozen=True)
class Rollout:
    """Where samples come from.

    Attributes:
        generator: holds the published weights.
        prompts: samples the prompts of each step.
        sampler: generates and scores the held-out prompts.
        held_out: None when nothing is evaluated.
        more_held_out: further sets by name, which are reported beside it.
    """

    generator: Generator
    prompts: PromptSampling
    sampler: Sampler
    held_out: HeldOut | None
    more_held_out: Mapping[str, HeldOut] = field(default_factory=dict)


@dataclass(frozen=True)
class Observers:
    """Who looks at a step when it is done: guards, and files with its samples and fingerprints.

    Attributes:
        key_data: dumps chosen steps; None when there are none.
    """

    guards: Guards
    samples: SampleWriter
    fingerprint: FingerprintWriter
    key_data: KeyData | None = None


@dataclass(frozen=True)
class Parts:
    """All of it."""

    team: Team
    policy: Policy
    rows: RowOptions
    rollout: Rollout
    observers: Observers
    timer: StageTimer
