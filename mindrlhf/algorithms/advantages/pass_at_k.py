"""Pass@k training: how much a sample helps the best of k.

With g(S) = max_{j in S} r_j over all subsets S of `pass_k` samples of a group of n,

    A_i = (mean of g over the S that hold i - mean of g over all S) / std of g over all S

For rewards of 0 and 1 this is the closed form of Chen et al. 2025 (arXiv:2508.10751), the analytical derivation, there
for the right and the wrong samples; the mean over all S is the unbiased estimate of pass@k of Chen et al. 2021
(arXiv:2107.03374), eq. 1. Written with order statistics, so that nothing is sampled and any rewards will do.
A group whose subsets all have the same best, and one of fewer than `pass_k` + 1 samples, has advantage 0.
"""

from math import comb

import numpy as np

from mindrlhf.algorithms.advantages import EQUAL_REWARDS_STD, RewardBatch

NEEDS = ("group",)
OPTIONS = {"pass_k": (4, 1, None, "the k of pass@k, below `num_generations`")}
PER_TOKEN = "never"


def group_advantages(rewards: np.ndarray, pass_k: int) -> np.ndarray:
    """Return the advantages of one group, float64 [n], from its rewards, float64 [n]."""
    size = len(rewards)
    if size <= pass_k:
        return np.zeros(size)
    order = np.argsort(rewards, kind="stable")
    ranked = rewards[order]
    # The sample at rank m is the best of a subset when the other k - 1 come from the m below it.
    shares = np.array([comb(rank, pass_k - 1) / comb(size, pass_k) for rank in range(size)])
    mean = shares @ ranked
    std = np.sqrt(shares @ (ranked - mean) ** 2)
    if std <= EQUAL_REWARDS_STD:
        return np.zeros(size)
    advantages = np.zeros(size)
    subsets = comb(size - 1, pass_k - 1)
    for rank, index in enumerate(order):
        # Subsets that hold this sample: it is the best where the others come from below, else the best lies above.
        best = comb(rank, pass_k - 1) * ranked[rank]
        if pass_k > 1:
            best += sum(comb(above - 1, pass_k - 2) * ranked[above] for above in range(rank + 1, size))
        advantages[index] = (best / subsets - mean) / std
    return advantages


def estimate(batch: RewardBatch, *, pass_k: int = 4) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample, constant within a response."""
    totals = batch.totals()
    advantages = np.zeros(len(totals))
    for group in batch.groups():
        advantages[group] = group_advantages(totals[group], pass_k)
    return batch.spread(advantages)
