"""Tokens that are left out of the loss so that entropy lasts: NumPy, float64."""

import zlib
from collections.abc import Sequence

import numpy as np

OPTIONS = {
    "clip_cov_ratio": (0.0, 0.0, 1.0, "share of tokens left out of the loss, of those whose update costs most entropy"),
    "clip_cov_low": (1.0, 0.0, None, "smallest covariance of a token that may be left out"),
    "clip_cov_high": (5.0, 0.0, None, "largest covariance of a token that may be left out"),
}


def clip_cov(
    advantages: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    *,
    ratio: float,
    low: float,
    high: float,
    seed: int,
) -> list[np.ndarray]:
    """Return the advantages, 0 for tokens whose update would cost most entropy: Clip-Cov.

        Cov_t = (log pi_t - mean(log pi)) (A_t - mean(A)),  the means over the N tokens of a step

    Of the tokens with low <= Cov_t <= high, floor(ratio N) but one at least, drawn at random, have no gradient: Cui et
    al. 2025 (arXiv:2505.22617), section 4.2. pi is the policy that generated the tokens: the one that a step's first
    update begins with.

    Args:
        advantages: float64 [response] for each sample of a step.
        logprobs: [response] each, of the sampled tokens.
        ratio: the share of tokens.
        low, high: bounds of the covariance.
        seed: of the run; the tokens drawn are a function of it and of ``logprobs``.
    """
    flat, logp = np.concatenate(advantages), np.concatenate(logprobs).astype(np.float64)
    covariances = (logp - logp.mean()) * (flat - flat.mean())
    candidates = np.flatnonzero((covariances >= low) & (covariances <= high))
    path = [seed, zlib.crc32(np.concatenate(logprobs).astype(np.float32).tobytes())]
    # As the order of an epoch: raw keys are the same with every NumPy.
    keys = np.random.PCG64(np.random.SeedSequence(path)).random_raw(len(candidates))
    drawn = candidates[np.argsort(keys, kind="stable")[: max(1, int(ratio * len(flat)))]]
    flat[drawn] = 0.0
    return np.split(flat, np.cumsum([len(part) for part in advantages])[:-1])
