"""Rows of a graph's inputs and outputs that belong to a rank.

Graphs are compiled for the rows of all data-parallel ranks. They split them into pipeline micro-batches first
(without a pipeline, the micro-batches whose gradients they accumulate). Rank d of that axis reads the d-th of equal
blocks of each part, and nothing else. So a rank is sent its own rows only, and the others may hold anything.
"""

from collections.abc import Sequence

import numpy as np

from mindrlhf.config.training import ParallelSection
from mindrlhf.layout.layout import Layout

# Tokens of each rank that shares a row: MindFormers' attention kernels work on blocks of so many.
_STEP_LENGTH = 128


def updates_return_outputs(parallel: ParallelSection) -> bool:
    """True when the graph of an update returns the model's outputs of its rows, which saves another pass.

    Not where gradients are accumulated without a pipeline: MindSpore 2.10.0 finds no order for it ("Graph cycle
    exists").
    """
    return parallel.pipeline_stage > 1 or parallel.micro_batch_num == 1


def num_logprob_micro_batches(parallel: ParallelSection) -> int:
    """Return how many parts the graph of the log-probabilities splits its rows into: only a pipeline needs any."""
    return parallel.micro_batch_num if parallel.pipeline_stage > 1 else 1


def block_of(layout: Layout, rank: int, num_rows: int) -> slice:
    """The rows of a rank, of ``num_rows`` of all ranks."""
    size = num_rows // layout.data_parallel
    start = layout.coordinates(rank).data * size
    return slice(start, start + size)


def place_rows(array: np.ndarray, layout: Layout, rank: int, num_micro_batches: int) -> np.ndarray:
    """Put a rank's rows [rows, ..] where it reads them in an array for all ranks [data_parallel * rows, ..].

    The array is zero elsewhere; ``num_micro_batches``, into which the graph splits it, divides the number of rows.
    """
    assert len(array) % num_micro_batches == 0, f"{len(array)} rows, {num_micro_batches} micro-batches"
    whole = np.zeros((layout.data_parallel * len(array), *array.shape[1:]), array.dtype)
    for micro_batch, own in zip(np.split(whole, num_micro_batches), np.split(array, num_micro_batches)):
        micro_batch[block_of(layout, rank, len(micro_batch))] = own
    return whole


def own_rows(micro_batches: Sequence[np.ndarray], layout: Layout, rank: int) -> np.ndarray:
    """A rank's rows of an output that comes by pipeline micro-batch, each with rows of all ranks."""
    return np.concatenate([one[block_of(layout, rank, len(one))] for one in micro_batches])


def step_length(layout: Layout) -> int:
    """Length of the rows of weight 0 in a call that makes an update whose gradients are there already."""
    return _STEP_LENGTH * layout.context_parallel * (layout.model_parallel if layout.use_seq_parallel else 1)
