"""GRPO with rewards of steps, such as the turns of an episode: a token is worth what the steps from it on earned.

    A_t = sum_{j: end_j >= t} (r_j - mean(R)) / (std(R) + 1e-6)

for the rewards r_j of the response's steps and R those of all steps of the group's responses, with the sample standard
deviation (n - 1): process supervision of Shao et al. 2024 (arXiv:2402.03300), section 4.1.3. What a response earned as
a whole is of its last step, penalties are of the step of their token. Where every response is one step
it is :mod:`mindrlhf.algorithms.advantages.grpo`. A group of one step, or whose steps all earned the same, has
advantage 0.
"""

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, scaled

NEEDS = ("group",)
OPTIONS = {}
PER_TOKEN = "always"


def estimate(batch: RewardBatch) -> list[np.ndarray]:
    """Return the advantages, float64 [response] for each sample."""
    tokens, result = batch.token_rewards(), batch.spread(np.zeros(len(batch.rewards)))
    ends = [
        np.union1d(np.asarray(batch.steps[i][0], int) if batch.steps else [], [length - 1]).astype(int)
        for i, length in enumerate(batch.lengths)
    ]
    for group in batch.groups():
        # A step begins behind the end of the one before it.
        earned = [np.add.reduceat(tokens[i], np.append(0, ends[i][:-1] + 1)) for i in group]
        every = np.concatenate(earned)
        if len(every) < 2:
            continue
        normalised = np.split(scaled(every - every.mean(), every.std(ddof=1)), np.cumsum([len(e) for e in earned])[:-1])
        for i, values in zip(group, normalised):
            to_go = values[::-1].cumsum()[::-1]
            result[i] += to_go[np.searchsorted(ends[i], np.arange(batch.lengths[i]))]
    return result
