"""Reward and held-out accuracy that part ways: the first sign of a reward that is being gamed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.evaluation.heldout import Evaluation, paired
from mindrlhf.evaluation.statistics import bootstrap_interval

MIN_STEPS = 5  # between two evaluations, for a standard error of their mean reward
_STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class _Period:
    """The steps between two evaluations, and the second of these."""

    rewards: tuple[float, ...]  # mean of each step
    evaluation: Evaluation


class RewardWatch:
    """Compares the rewards of training with held-out accuracy, from evaluation to evaluation.

    It knows only what it was told: a resumed run begins anew.
    """

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._best: _Period | None = None

    def note(self, mean_reward: float) -> None:
        self._rewards.append(mean_reward)

    def review(self, evaluation: Evaluation) -> str:
        """Return one line if rewards have risen and accuracy has fallen since the best evaluation, else nothing.

        Both must be more than chance: the rewards' difference two standard errors of the steps' means, and the 95 %
        interval of the accuracy's difference, prompt by prompt, below 0.
        """
        rewards, self._rewards = self._rewards, []
        if len(rewards) < MIN_STEPS:
            return ""
        now, best = _Period(tuple(rewards), evaluation), self._best
        if best is None or not best.evaluation.is_comparable(evaluation):
            self._best = now
            return ""
        if evaluation.accuracy >= best.evaluation.accuracy:
            self._best = now
            return ""
        before, after = paired(best.evaluation, evaluation)
        fall = bootstrap_interval(after - before)
        if fall.high >= 0 or not _has_risen(best.rewards, now.rewards):
            return ""
        return (
            f"step {evaluation.step}: the reward rose from {np.mean(best.rewards):.3f} to {np.mean(now.rewards):.3f}, "
            f"but held-out accuracy fell by {-fall.mean:.1%} since step {best.evaluation.step}: look at the samples "
            "with 'mindrlhf view'"
        )


def _has_risen(before: Sequence[float], now: Sequence[float]) -> bool:
    error = math.sqrt(np.var(before, ddof=1) / len(before) + np.var(now, ddof=1) / len(now))
    return float(np.mean(now) - np.mean(before)) > _STANDARD_ERRORS * error
