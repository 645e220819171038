"""Which rows of a graph's inputs and outputs belong to a rank.

Graphs are compiled for the rows of all data-parallel ranks. They cut them into pieces first (the micro-batches of a
pipeline, or of accumulated gradients), and rank d of that axis reads the d-th of equal blocks of every piece, and
nothing else. So a rank is sent its own rows only, and the others may hold anything.
"""

from collections.abc import Sequence

import numpy as np

from mindrlhf.config.sections import ParallelSection
from mindrlhf.layout.layout import Layout


def num_update_pieces(parallel: ParallelSection) -> int:
    """Return how many pieces the graph of an update cuts its rows into."""
    return parallel.micro_batch_num


def num_logprob_pieces(parallel: ParallelSection) -> int:
    """Return how many pieces the graph of the log-probabilities cuts its rows into: only a pipeline needs any."""
    return parallel.micro_batch_num if parallel.pipeline_stage > 1 else 1


def block_of(layout: Layout, rank: int, num_rows: int) -> slice:
    """The rows of a rank, of ``num_rows`` of all ranks."""
    size = num_rows // layout.data_parallel
    start = layout.coordinates(rank).data * size
    return slice(start, start + size)


def place_rows(array: np.ndarray, layout: Layout, rank: int, num_pieces: int) -> np.ndarray:
    """Put a rank's rows [rows, ..] where it reads them in an array for all ranks [data_parallel * rows, ..].

    The array is zero elsewhere; ``num_pieces``, into which the graph cuts it, divides the number of rows.
    """
    assert len(array) % num_pieces == 0, f"{len(array)} rows cannot be cut into {num_pieces} pieces"
    whole = np.zeros((layout.data_parallel * len(array), *array.shape[1:]), array.dtype)
    for piece, own in zip(np.split(whole, num_pieces), np.split(array, num_pieces)):
        piece[block_of(layout, rank, len(piece))] = own
    return whole


def own_rows(pieces: Sequence[np.ndarray], layout: Layout, rank: int) -> np.ndarray:
    """A rank's rows of an output that comes in pieces, each with rows of all ranks."""
    return np.concatenate([piece[block_of(layout, rank, len(piece))] for piece in pieces])
