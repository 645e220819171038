"""Which rows of a graph's inputs and outputs belong to a rank.

Graphs are compiled for the rows of all data-parallel ranks: rank d of that axis reads the d-th of equal blocks of its
inputs, and nothing else. So a rank is sent its own block only, and the others may hold anything.
"""

from collections.abc import Sequence

import numpy as np

from mindrlhf.parallel.layout import Layout


def block_of(layout: Layout, rank: int, num_rows: int) -> slice:
    """The rows of a rank, of ``num_rows`` of all ranks."""
    size = num_rows // layout.data_parallel
    start = layout.coordinates(rank).data * size
    return slice(start, start + size)


def place_rows(array: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    """A rank's rows [rows, ..] in an array for all ranks [data_parallel * rows, ..], zero elsewhere."""
    whole = np.zeros((layout.data_parallel * len(array), *array.shape[1:]), array.dtype)
    whole[block_of(layout, rank, len(whole))] = array
    return whole


def own_rows(pieces: Sequence[np.ndarray], layout: Layout, rank: int) -> np.ndarray:
    """A rank's rows of an output that comes in pieces, each with rows of all ranks."""
    return np.concatenate([piece[block_of(layout, rank, len(piece))] for piece in pieces])
