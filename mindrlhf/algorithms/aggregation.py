"""Aggregation of token losses to one number: NumPy weights, so that the graph only adds up.

With N the responses of an optimiser update, n_i the tokens of response i and T = sum n_i:

    token_mean      1 / T sum_i sum_t loss_it               DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 8
    sequence_mean   1 / N sum_i 1 / n_i sum_t loss_it       GRPO, Shao et al. 2024 (arXiv:2402.03300), eq. 3
    sequence_sum    1 / (N L) sum_i sum_t loss_it           Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), fig. 1

where L is a fixed length, `rollout.max_response_length`. Responses that are filtered out count in none of these.
"""

import numpy as np

MODES = ("token_mean", "sequence_mean", "sequence_sum")


def token_weights(lengths: np.ndarray, kept: np.ndarray, mode: str, max_length: int) -> np.ndarray:
    """Return the weight of every token of each response, in units of 1 / T: exactly 1 for a whole token mean.

    Args:
        lengths: int [responses] of one optimiser update, over all ranks.
        kept: bool [responses]; False filters a response out.
        mode: one of ``MODES``.
        max_length: L.

    Returns:
        float64 [responses]; all 0 when nothing is kept.
    """
    assert mode in MODES, f"there is no aggregation {mode!r}"
    lengths, kept = np.asarray(lengths, np.float64), np.asarray(kept, bool)
    if not kept.any():
        return np.zeros(len(lengths))
    if mode == "token_mean":
        weights = np.full(len(lengths), lengths.sum() / lengths[kept].sum())
    elif mode == "sequence_mean":
        weights = lengths.sum() / (kept.sum() * lengths)
    else:
        weights = np.full(len(lengths), lengths.sum() / (kept.sum() * max_length))
    return np.where(kept, weights, 0.0)
