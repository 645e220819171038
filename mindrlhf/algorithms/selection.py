"""Which groups of samples teach anything: NumPy."""

import numpy as np

# Rewards of one group that lie within this range are equal up to rounding.
NO_SIGNAL_RANGE = 1e-8


def groups_with_signal(rewards: np.ndarray, group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct group ids, ascending, and for each whether its rewards differ.

    The condition of DAPO's dynamic sampling, 0 < number of right samples < group size: Yu et al. 2025
    (arXiv:2503.14476), eq. 11, for any rewards.

    Args:
        rewards: float [samples].
        group_ids: int [samples].

    Returns:
        int [groups] and bool [groups]. A group of one sample has no signal.
    """
    rewards, group_ids = np.asarray(rewards, np.float64), np.asarray(group_ids)
    groups, places = np.unique(group_ids, return_inverse=True)
    highest, lowest = np.full(len(groups), -np.inf), np.full(len(groups), np.inf)
    np.maximum.at(highest, places, rewards)
    np.minimum.at(lowest, places, rewards)
    return groups, highest - lowest > NO_SIGNAL_RANGE
