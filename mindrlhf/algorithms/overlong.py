"""DAPO's punishment and filter of responses that are too long: NumPy."""

from collections.abc import Sequence

import numpy as np


def soft_punishment(lengths: np.ndarray, max_length: int, buffer: int) -> np.ndarray:
    """Return what to add to the rewards: from 0 where the buffer begins linearly down to -1 at the limit.

    With L the limit and C the buffer: 0 for n <= L - C, ((L - C) - n) / C up to L, -1 beyond. Yu et al. 2025
    (arXiv:2503.14476), eq. 13.

    Args:
        lengths: int [samples], response tokens.
        max_length: L, in tokens.
        buffer: C, in tokens, at least 1.

    Returns:
        float64 [samples], between -1 and 0.
    """
    assert 0 < buffer <= max_length, f"a buffer of {buffer} tokens does not fit a limit of {max_length}"
    return np.clip((max_length - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


def complete(finish_reasons: Sequence[str]) -> np.ndarray:
    """Return which responses ended by themselves, bool [samples]; overlong filtering leaves the others out of the loss.

    Yu et al. 2025 (arXiv:2503.14476), section 3.4.
    """
    return np.array([reason != "length" for reason in finish_reasons], bool)
