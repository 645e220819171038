"""GDPO: several rewards, each normalised apart before they are added up.

    A_i = sum_k w_k (r_ki - mean(r_k)) / (std(r_k) + 1e-6),  then A / (std(A of the batch) + 1e-6)

for the reward r_k of each verifier within one group, and its weight w_k: Liu et al. 2026 (arXiv:2601.05242). Samples
whose sums agree but whose rewards differ are then told apart. The standard deviations are those of samples (n - 1). The
paper also takes off the batch's mean, which is 0, as that of every group is. A group of one sample, or whose rewards
are all equal, has advantage 0.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, scaled

NEEDS = ("group", "parts")
OPTIONS = {}
PER_TOKEN = "never"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample, constant within a response."""
    assert batch.parts is not None, "GDPO needs the rewards of each verifier"
    advantages = np.zeros(len(batch.rewards))
    for weight, rewards in batch.parts:
        for group in batch.groups():
            own = rewards[group]
            if len(group) > 1 and not np.isnan(own).any():
                advantages[group] += weight * scaled(own - own.mean(), own.std(ddof=1))
    return batch.spread(scaled(advantages, advantages.std(ddof=1) if len(advantages) > 1 else 0.0))
