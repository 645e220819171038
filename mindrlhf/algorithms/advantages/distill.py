"""On-policy distillation: each token's reverse KL against a teacher is its advantage.

    A_t = -beta (log pi_student(t) - log pi_teacher(t)) + weight (r - mean(r of the group))

The student's own samples are scored by the teacher, and each token is an action of its own, without the rewards of
later ones: Agarwal et al. 2024 (arXiv:2306.13649), section 3, with reverse KL; Gu et al. 2024 (arXiv:2306.08543),
eq. 3, without the long-term part. The teacher is the reference model; the first term is the KL in the reward with
estimator k1, token by token. ``weight`` mixes in the verifiers' rewards as Dr. GRPO takes them; 0 leaves them out.
"""

import numpy as np

from mindrlhf.algorithms.advantages import EQUAL_REWARDS_STD, RewardBatch

NEEDS = ("teacher",)
OPTIONS = {"distill_reward_weight": (0.0, 0.0, None, "weight of rewards beside the teacher's verdict")}
PER_TOKEN = "penalised"


def estimate(batch: RewardBatch, distill_reward_weight: float = 0.0) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample."""
    offsets = np.zeros(len(batch.rewards))
    if distill_reward_weight:
        for group in batch.groups():
            rewards = np.asarray(batch.rewards, np.float64)[group]
            if rewards.std() > EQUAL_REWARDS_STD:
                offsets[group] = distill_reward_weight * (rewards - rewards.mean())
    result = batch.spread(offsets)
    for advantages, penalty in zip(result, batch.penalties or ()):
        advantages -= penalty
    return result
