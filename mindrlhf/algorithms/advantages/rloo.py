"""RLOO: the reward minus the mean of the other samples of the group (leave one out).

    A_i = r_i - 1 / (n - 1) sum_{j != i} r_j

Ahmadian et al. 2024 (arXiv:2402.14740), the RLOO estimator, which is that of Kool et al. 2019. With KL in the reward,
r_i is the reward minus the response's whole penalty. A group of one sample, or whose rewards are all equal, has
advantage 0.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, centred

NEEDS = ("group",)
OPTIONS = {}
PER_TOKEN = "never"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample, constant within a response."""
    advantages = centred(batch)
    for group in batch.groups():
        if len(group) > 1:
            # r_i - (n mean - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
            advantages[group] *= len(group) / (len(group) - 1)
    return batch.spread(advantages)
