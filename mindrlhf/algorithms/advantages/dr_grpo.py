"""Dr. GRPO: the reward minus the group's mean.

    A_i = r_i - mean(r)

for the rewards r of one group: Liu et al. 2025 (arXiv:2503.20783), section 3.2, which removes GRPO's division by the
standard deviation because it weighs very easy and very hard prompts more. A group of one sample, or whose rewards are
all equal, has advantage 0.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, centred

NEEDS = ("group",)
OPTIONS = {}
PER_TOKEN = "never"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample, constant within a response."""
    return batch.spread(centred(batch))
