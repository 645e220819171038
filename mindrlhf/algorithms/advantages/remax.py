"""ReMax: the reward to go minus the reward of the greedy response to the same prompt; needs no group.

    A_t = r - sum_{s >= t} penalty_s - r_greedy

Li et al. 2023 (arXiv:2310.10505), algorithm 1. The loop samples the greedy response (temperature 0), one for each
prompt.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch

NEEDS = ("baselines",)
OPTIONS = {}
PER_TOKEN = "penalised"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample."""
    assert batch.baselines is not None, "ReMax needs the greedy rewards"
    return [returns - baseline for returns, baseline in zip(batch.rewards_to_go(), batch.baselines)]
