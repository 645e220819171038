"""MaxRL: the reward relative to the group's mean, in units of that mean: rare successes count more.

    A_i = (r_i - mean(r)) / mean(r)

for the rewards r of one group: Tajwar et al. 2026 (arXiv:2602.02710). For rewards of 0 and 1 its policy gradient is,
but for the control variate, the mean of grad log pi over the right samples: an estimate of the gradient of the log of
the pass rate, as far as n samples tell it. A group without a right sample, or whose rewards are all equal, has
advantage 0.
"""

import numpy as np

from mindrlhf.algorithms.advantages import EQUAL_REWARDS_STD, RewardBatch, centred
from mindrlhf.errors import UserError

NEEDS = ("group",)
OPTIONS = {}
PER_TOKEN = "never"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample, constant within a response.

    Raises:
        UserError: a reward is below 0, and a mean would say nothing about successes.
    """
    totals, advantages = batch.totals(), centred(batch)
    if totals.min() < 0:
        raise UserError(
            f"'algorithm.advantage' is maxrl, which is for rewards of successes, from 0, but a sample earned "
            f"{totals.min():g}: choose other verifiers or weights, or set it to grpo"
        )
    for group in batch.groups():
        mean = totals[group].mean()
        advantages[group] /= mean if mean > EQUAL_REWARDS_STD else 1.0
    return batch.spread(advantages)
