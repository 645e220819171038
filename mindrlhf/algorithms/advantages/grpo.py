"""GRPO: the reward relative to the group, in units of the group's standard deviation.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)

for the rewards r of one group, with the sample standard deviation (n - 1). Outcome supervision of Shao et al. 2024
(arXiv:2402.03300), section 4.1.2. Without the division it is
:mod:`mindrlhf.algorithms.advantages.dr_grpo`. A group of one sample, or whose rewards are all equal, has advantage 0.
"""

import numpy as np

from mindrlhf.algorithms.advantages import EPSILON, RewardBatch, centred

NEEDS = ("group",)
OPTIONS = {}
PER_TOKEN = "never"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample, constant within a response."""
    advantages = centred(batch)
    totals = batch.totals()
    for group in batch.groups():
        if len(group) > 1:
            advantages[group] /= totals[group].std(ddof=1) + EPSILON
    return batch.spread(advantages)
