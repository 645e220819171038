"""REINFORCE++: the reward to go of each token, whitened over all tokens of the batch; needs no group.

    A_t = r - sum_{s >= t} penalty_s, then (A - mean(A)) / std(A)

with the mean and the population standard deviation over the tokens of the whole batch: Hu et al. 2025
(arXiv:2501.03262), section 3. The penalties are those of KL in the reward (`kl_in: reward`), estimator k1 in the paper.
When all are equal the advantages are 0.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, whitened

NEEDS = ()
OPTIONS = {}
PER_TOKEN = "penalised"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample."""
    return whitened(batch.rewards_to_go())
