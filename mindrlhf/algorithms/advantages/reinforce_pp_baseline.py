"""REINFORCE++-baseline: the reward minus the group's mean, whitened over all tokens of the batch.

    A_i = r_i - mean(r of the group), then (A - mean(A)) / std(A)

with the second mean and the population standard deviation over the tokens of the whole batch: Hu et al. 2025
(arXiv:2501.03262), section 3, the variant for several samples per prompt. Unlike GRPO it divides by one standard
deviation for all groups. A group of one sample, or whose rewards are all equal, has 0 before whitening.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, centred, whitened

NEEDS = ("group",)
OPTIONS = {}
PER_TOKEN = "never"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample, constant within a response."""
    return whitened(batch.spread(centred(batch)))
