"""Advantage estimators: NumPy, float64, over all samples of a step. One estimator is one module of this package.

Each module states in literals what it takes, and has one function:

    NEEDS: what must be there: "group" (several samples per prompt), "baselines", "values" or "parts" of
        :class:`RewardBatch`, "teacher" (penalties of a reference model that is another than the start)
    OPTIONS: its options, see :mod:`mindrlhf.algorithms.options`
    PER_TOKEN: advantages differ within a response: "always", "penalised" (with KL in the reward) or "never"
    estimate(batch: RewardBatch, **options) -> list of float64 [response], one for each sample
"""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

# Below this standard deviation rewards count as equal: what is left is rounding.
EQUAL_REWARDS_STD = 1e-8
# What is added to a standard deviation that something is divided by.
EPSILON = 1e-6


@dataclass(frozen=True)
class RewardBatch:
    """Inputs of advantage estimators. Samples of one prompt share a group id; groups may differ in size.

    Raises:
        ValueError: the parts do not fit each other, or hold a value that is not finite.
    """

    rewards: np.ndarray  # float64 [samples]
    group_ids: np.ndarray  # int [samples]
    lengths: np.ndarray  # int [samples], response tokens, each at least 1
    penalties: Sequence[np.ndarray] | None = None  # float64 [response] each: what the KL in the reward takes off
    baselines: np.ndarray | None = None  # float64 [samples]: reward of the greedy response to the same prompt
    values: Sequence[np.ndarray] | None = None  # float64 [response] each: the critic's value before each token
    # The summands of the rewards: each a weight and float64 [samples], NaN where it does not apply to the prompt.
    parts: Sequence[tuple[float, np.ndarray]] | None = None
    # What of each reward was given on the way: int, places of the last tokens of the steps, ascending, and float64,
    # their rewards. The rest of the reward stands at the last token.
    steps: Sequence[tuple[np.ndarray, np.ndarray]] | None = None

    def __post_init__(self):
        count = len(self.rewards)
        for name in ("group_ids", "lengths", "penalties", "baselines", "values", "steps"):
            part = getattr(self, name)
            if part is not None and len(part) != count:
                raise ValueError(f"{name} has {len(part)} entries for {count} rewards")
        for sample, length in enumerate(self.lengths):
            if length < 1:
                raise ValueError(f"sample {sample} has {length} response tokens: a reward needs one to stand at")
        for name in ("rewards", "baselines"):
            part = getattr(self, name)
            if part is not None and not np.isfinite(part).all():
                raise ValueError(f"{name} hold a value that is not finite")
        for name in ("penalties", "values"):
            for sample, part in enumerate(getattr(self, name) or ()):
                if len(part) != self.lengths[sample] or not np.isfinite(part).all():
                    raise ValueError(
                        f"{name} of sample {sample} must be {self.lengths[sample]} finite numbers, one for each token"
                    )

        for sample, (ends, given) in enumerate(self.steps or ()):
            is_placed = np.all(np.diff(ends) > 0) and np.all((ends >= 0) & (ends < self.lengths[sample]))
            if len(ends) != len(given) or not is_placed or not np.isfinite(given).all():
                raise ValueError(f"steps of sample {sample} must be ascending places in it, and finite rewards")

    def totals(self) -> np.ndarray:
        """Return the reward of each response as a whole, its penalties taken off; float64 [samples]."""
        rewards = np.asarray(self.rewards, np.float64)
        if self.penalties is None:
            return rewards
        return rewards - [penalty.sum() for penalty in self.penalties]

    def token_rewards(self) -> list[np.ndarray]:
        """Return the reward of each token: its penalty, its step's reward, at the last token the rest of the reward."""
        result = [np.zeros(length) for length in self.lengths]
        for index, rewards in enumerate(result):
            if self.penalties is not None:
                rewards -= self.penalties[index]
            rewards[-1] += self.rewards[index]
            if self.steps is not None:
                ends, given = self.steps[index]
                rewards[-1] -= np.sum(given)
                rewards[ends] += given
        return result

    def rewards_to_go(self) -> list[np.ndarray]:
        """Return for each token the sum of its own and all later token rewards."""
        return [rewards[::-1].cumsum()[::-1] for rewards in self.token_rewards()]

    def groups(self) -> Iterator[np.ndarray]:
        """Yield the sample indices of each group."""
        for group in np.unique(self.group_ids):
            yield np.flatnonzero(self.group_ids == group)

    def spread(self, values: np.ndarray) -> list[np.ndarray]:
        """Return a value per sample as an array per response."""
        return [np.full(length, value) for length, value in zip(self.lengths, values)]


def centred(batch: RewardBatch) -> np.ndarray:
    """Return each sample's total minus the mean of its group, float64 [samples]; 0 where all of a group are equal."""
    totals = batch.totals()
    result = np.zeros(len(totals))
    for group in batch.groups():
        rewards = totals[group]
        if len(group) > 1 and rewards.std(ddof=1) > EQUAL_REWARDS_STD:
            result[group] = rewards - rewards.mean()
    return result


def scaled(values: np.ndarray, std: float) -> np.ndarray:
    """Return values over a standard deviation + 1e-6; 0 where the deviation is rounding."""
    return values / (std + EPSILON) if std > EQUAL_REWARDS_STD else np.zeros(len(values))


def whitened(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Shift and scale the advantages of all tokens together to mean 0 and standard deviation 1; all 0 when equal."""
    tokens = np.concatenate(advantages)
    std = tokens.std()
    if std <= EQUAL_REWARDS_STD:
        return [np.zeros(len(part)) for part in advantages]
    return [(part - tokens.mean()) / std for part in advantages]


def names() -> tuple[str, ...]:
    """Return the names of all estimators, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find(name: str) -> ModuleType:
    """Return the module of an estimator."""
    assert name in names(), f"there is no advantage estimator {name!r}"
    return importlib.import_module(f"{__name__}.{name}")


# Rewards of one group that lie within this range are equal up to rounding.
NO_SIGNAL_RANGE = 1e-8


def groups_with_signal(rewards: np.ndarray, group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct group ids, ascending, and for each whether its rewards differ.

    The condition of DAPO's dynamic sampling, 0 < number of right samples < group size: Yu et al. 2025
    (arXiv:2503.14476), eq. 11, for any rewards.

    Args:
        rewards: float [samples]; NaN where nothing is known.
        group_ids: int [samples].

    Returns:
        int [groups] and bool [groups]. A group of one sample has no signal.
    """
    rewards, group_ids = np.asarray(rewards, np.float64), np.asarray(group_ids)
    groups, places = np.unique(group_ids, return_inverse=True)
    highest, lowest = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.fmax.at(highest, places, rewards)
    np.fmin.at(lowest, places, rewards)
    return groups, highest - lowest > NO_SIGNAL_RANGE
