"""Advantage estimators: NumPy, float64, over the whole batch of a step."""

import numpy as np

# Below this standard deviation a group's rewards count as equal: what is left is rounding.
EQUAL_REWARDS_STD = 1e-8


def group_normalised(rewards: np.ndarray, *, scale: bool = True, epsilon: float = 1e-6) -> np.ndarray:
    """Return each sample's reward relative to its group.

    A_i = (r_i - mean(r)) / (std(r) + epsilon), with the sample standard deviation (n - 1): the outcome
    supervision of GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2. Without ``scale`` it is
    A_i = r_i - mean(r), Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2.

    Args:
        rewards: float [groups, group_size].
        scale: divide by the group's standard deviation.
        epsilon: added to the standard deviation.

    Returns:
        float64 [groups, group_size]; exactly 0 in groups whose rewards are all equal.

    Raises:
        ValueError: ``group_size`` is below 2, or a reward is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards have shape {rewards.shape}, but a group baseline needs [groups, 2 or more]")
    if not np.isfinite(rewards).all():
        raise ValueError("rewards hold a value that is not finite")
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    std = rewards.std(axis=1, ddof=1, keepdims=True)
    centred[(std <= EQUAL_REWARDS_STD)[:, 0]] = 0.0
    return centred / (std + epsilon) if scale else centred
