"""Buckets of the parameters, which the optimiser's step works on in turn."""

from collections.abc import Sequence

import numpy as np

NUM_BUCKETS = 8


def buckets_of_equal_size(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Divide a list of parameters into buckets (start, stop) of about the same number of elements, at most NUM_BUCKETS.

    MindSpore works a graph off level by level, so that the intermediate results of all parameters would exist at
    once; so one bucket waits for the one before. (A chain from parameter to parameter takes the compiler hours.)

    Args:
        sizes: elements of every parameter, at least 1.
    """
    ends = np.cumsum(sizes)
    bucket = np.ceil(ends / ends[-1] * NUM_BUCKETS).astype(int)
    starts = [0, *(i for i in range(1, len(sizes)) if bucket[i] != bucket[i - 1])]
    return tuple(zip(starts, [*starts[1:], len(sizes)]))
