"""Lite PPO: the reward minus the group's mean, in units of the whole batch's standard deviation.

    A_i = (r_i - mean(r of the group)) / (std(r of the batch) + 1e-6)

with the sample standard deviation (n - 1) of all rewards of a step: Liu et al. 2025 (arXiv:2508.08221), whose Lite PPO
takes this with PPO's loss and a mean over tokens. A group of one sample, or whose rewards are all equal, has
advantage 0.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, centred, scaled

NEEDS = ("group",)
OPTIONS = {}
PER_TOKEN = "never"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample, constant within a response."""
    totals = batch.totals()
    return batch.spread(scaled(centred(batch), totals.std(ddof=1) if len(totals) > 1 else 0.0))
