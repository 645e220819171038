"""Sums over the sequences that share a packed row: graph code of static shape."""

from mindspore import ops


def sequence_sums(values, segment_ids):
    """Return at each position the sum of ``values`` over its own sequence.

    Args:
        values: float32 [rows, length], 0 where nothing is to be added.
        segment_ids: int32 [rows, length]: 1, 2, ... per sequence of a row, 0 = padding. No sequence spans two rows, so
            the sums do not depend on what else is in a row or micro-batch.

    Returns:
        float32 [rows, length].
    """
    rows, length = values.shape
    # Every row has room for as many sequences as tokens, so that the shape does not depend on the packing.
    places = ops.reshape(segment_ids + ops.reshape(ops.arange(0, rows), (-1, 1)) * (length + 1), (-1,))
    sums = ops.unsorted_segment_sum(ops.reshape(values, (-1,)), places, rows * (length + 1))
    return ops.reshape(ops.gather(sums, places, 0), (rows, length))


def sequence_means(values, mask, segment_ids):
    """Return at each position the mean of ``values`` over the response tokens (``mask`` 1) of its own sequence."""
    counts = sequence_sums(mask, segment_ids)
    return sequence_sums(values * mask, segment_ids) / ops.maximum(counts, ops.ones_like(counts))
