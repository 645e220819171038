"""The guard of the distance between the log-probabilities of rollout and training."""

from mindrlhf.config.observe import GuardSection
from mindrlhf.training.loop.guards.guard import Events, Guard


class RolloutDrift(Guard):
    """Warns when the distance passes ``guard.warn_rollout_diff``, and stops the run at ``guard.max_rollout_diff``."""

    def __init__(self, limits: GuardSection, events: Events):
        self._limits = limits
        self._events = events
        self._has_warned = False

    def review_logprobs(self, step: int, rollout_diff: float) -> None:
        """Compare the distance with the limits."""
        limits = self._limits
        said = f"step {step}: the log-probabilities of rollout and training differ by {rollout_diff:.3g} nats a token"
        # One that is not finite has been counted as a skipped update, unless the generator's are at fault.
        if 0 < limits.max_rollout_diff < rollout_diff:
            self.failure = (
                f"{said}, and guard.max_rollout_diff is {limits.max_rollout_diff:g}: the samples are not those of the "
                "trained weights; look where rollout_diff began to grow in metrics.jsonl, set rollout.top_p=1 and "
                "rollout.top_k=0, and resume from a checkpoint before, or raise the limit"
            )
        is_far = bool(limits.warn_rollout_diff) and not rollout_diff <= limits.warn_rollout_diff
        if is_far and not self._has_warned:
            warning = f"{said}, and guard.warn_rollout_diff is {limits.warn_rollout_diff:g}"
            self._events.write(step, "rollout_diff", warning, mean_abs=rollout_diff)
        self._has_warned = is_far
