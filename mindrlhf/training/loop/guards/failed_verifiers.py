"""The guard of verifiers that fail on every sample of a step: a run with such a one learns nothing from it."""

from collections.abc import Mapping, Sequence

from mindrlhf.config.observe import GuardSection
from mindrlhf.rollout.samples import Sample, verifier_names
from mindrlhf.training.loop.guards.guard import Events, Guard


class FailedVerifiers(Guard):
    """Reports a verifier at the first such step; ``guard.max_failed_steps`` of them in a row stop the run.

    Attributes:
        num_steps: such steps in a row, by verifier.
    """

    def __init__(self, limits: GuardSection, events: Events, num_steps: Mapping[str, int]):
        self.num_steps = dict(num_steps)
        self._limit = limits.max_failed_steps
        self._events = events

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look for verifiers that failed on all samples they were asked for."""
        asked = {name: [sample for sample in samples if name in sample.rewards] for name in verifier_names(samples)}
        failed = {
            name: (len(ones), ones[0].failures[name])
            for name, ones in asked.items()
            if all(name in sample.failures for sample in ones)
        }
        self.num_steps = {name: self.num_steps.get(name, 0) + 1 for name in failed}
        for name, (count, reason) in failed.items():
            num_steps = self.num_steps[name]
            said = f"step {step}: verifier {name} failed on all {count} samples ({reason})"
            if num_steps == 1:
                self._events.write(step, "failed_verifier", said, verifier=name, reason=reason)
            if self._limit and num_steps >= self._limit:
                self.failure = self.failure or (
                    f"{said}, {num_steps} steps in a row, and guard.max_failed_steps is {self._limit}: mend the "
                    "verifier ('mindrlhf rewards lint' tries it), and resume from a checkpoint before"
                )
