"""Generalised advantage estimation, with the values of a critic: PPO.

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t = sum_{l >= 0} (gamma gae_lambda)^l delta_{t+l}

Schulman et al. 2015 (arXiv:1506.02438), eq. 16. V_t is the value of the text before token t, and 0 after the
last token; r_t is a token's penalty, and at the last token the response's reward. With `whiten_advantages` the result
is shifted and scaled to mean 0 and standard deviation 1 over all tokens of the batch.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, whitened

NEEDS = ("values",)
OPTIONS = {
    "gamma": (1.0, 0.0, 1.0, "discount per token"),
    "gae_lambda": (0.95, 0.0, 1.0, "1 trusts the rewards alone, 0 the critic one token ahead"),
    "whiten_advantages": (True, None, None, "give the advantages of a step mean 0 and standard deviation 1"),
}
PER_TOKEN = "always"


def discounted_sums(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """Return the advantages of one response before whitening.

    Args:
        rewards, values: float64 [response].
        gamma: discount of a token's distance.
        gae_lambda: 1 trusts the rewards alone, 0 the critic one token ahead.

    Returns:
        float64 [response].
    """
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages = np.zeros(len(deltas))
    following = 0.0
    for position in reversed(range(len(deltas))):
        following = deltas[position] + gamma * gae_lambda * following
        advantages[position] = following
    return advantages


def targets(batch: RewardBatch, *, gamma: float, gae_lambda: float) -> list[np.ndarray]:
    """Return what the critic learns, the lambda-return of each token: float64 [response] for each sample.

    It is A_t + V_t, from the advantages before whitening.
    """
    pairs = zip(batch.token_rewards(), batch.values)
    return [discounted_sums(rewards, values, gamma, gae_lambda) + values for rewards, values in pairs]


def estimate(
    batch: RewardBatch, *, gamma: float = 1.0, gae_lambda: float = 0.95, whiten_advantages: bool = True
) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample."""
    assert batch.values is not None, "GAE needs the values of a critic"
    pairs = zip(batch.token_rewards(), batch.values)
    advantages = [discounted_sums(rewards, values, gamma, gae_lambda) for rewards, values in pairs]
    return whitened(advantages) if whiten_advantages else advantages
