"""The guards of a run's numbers, on rank 0, as one: they look at each step and say when the run must stop."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.checkpoint.algorithm_state import GuardsState
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import RunFailure
from mindrlhf.observe.fingerprint import FingerprintWriter
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.rollout.samples import Sample
from mindrlhf.training.loop.guards.failed_verifiers import FailedVerifiers
from mindrlhf.training.loop.guards.gradient_spikes import GradientSpikes
from mindrlhf.training.loop.guards.guard import Events
from mindrlhf.training.loop.guards.rollout_drift import RolloutDrift
from mindrlhf.training.loop.guards.skipped_updates import SkippedUpdates
from mindrlhf.training.loop.key_data import KeyData
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.step import Step


@dataclass(frozen=True)
class Observers:
    """Who looks at a step when it is done: guards, and files with its samples and fingerprints.

    Attributes:
        key_data: dumps chosen steps; None when there are none.
    """

    guards: "Guards"
    samples: SampleWriter
    fingerprint: FingerprintWriter
    key_data: KeyData | None = None


class Guards:
    """All guards, in the order in which they look at an update and in which their failures count.

    Args:
        config: of the run; its section ``guard`` holds the limits.
        policy: keeps the batches of a step until the next one.
        first_step: see :class:`mindrlhf.observe.records.JsonlWriter`.
        state: what :meth:`state` returned at the checkpoint that the run goes on from.
    """

    def __init__(self, config: GrpoConfig, policy: Policy, *, first_step: int, state: GuardsState | None = None):
        state = state or GuardsState()
        self._events = Events(Path(config.run.output_dir), first_step=first_step)
        self._skipped = SkippedUpdates(config, policy, self._events, state.num_skipped)
        self._spikes = GradientSpikes(config.guard, policy, self._events, state.norms)
        self._verifiers = FailedVerifiers(config.guard, self._events, state.failed_steps)
        self._guards = (self._skipped, self._spikes, self._verifiers, RolloutDrift(config.guard, self._events))

    def state(self) -> GuardsState:
        """Return what a resumed run needs."""
        return GuardsState(self._skipped.num_in_a_row, list(self._spikes.norms), dict(self._verifiers.num_steps))

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look at all samples that a step, from 1, generated, whether trained on or not; call it before ``review``."""
        for guard in self._guards:
            guard.review_rewards(step, samples)

    def review(self, step: Step, rollout_diff: float | None) -> dict[str, float]:
        """Look at a step, report what is strange, and return how often.

        Args:
            step: when its updates are done.
            rollout_diff: its ``rollout_diff/mean_abs``, in nats; None where all samples are of older weights.
        """
        counts = {guard.METRIC: 0 for guard in self._guards if guard.METRIC}
        for number in range(len(step.updates)):
            for guard in self._guards:
                if guard.review_update(step, number):
                    counts[guard.METRIC] += 1
        if rollout_diff is not None:
            for guard in self._guards:
                guard.review_logprobs(step.number, rollout_diff)
        return counts

    def check(self) -> None:
        """Stop the run if the steps so far demand it; call it when their metrics are written.

        Raises:
            RunFailure: they do.
        """
        for guard in self._guards:
            if guard.failure:
                raise RunFailure(guard.failure)

    def close(self) -> None:
        """Close the file of events."""
        self._events.close()
