"""Sums of bits, by which what was written is compared with what lies in memory elsewhere.

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

from collections.abc import Iterator

import numpy as np

from mindrlhf.weights.tensors import convert_dtype, dtype_name

# Memory is copied and summed piece by piece, so that the sum finds the piece in the cache.
_PIECE_BYTES = 1 << 20


def sum_bits(array: np.ndarray) -> int:
    """Return the sum of the elements' bits, modulo the width of an element."""
    words = array.view(f"<u{array.dtype.itemsize}")
    return int(np.add.reduce(words, axis=None, dtype=words.dtype))


def sum_region(region: np.ndarray) -> int:
    """Return the sum of the bits of a region of any size, not yet modulo the width of an element."""
    flat = region.reshape(-1) if region.flags.c_contiguous else region
    return sum(sum_bits(flat[rows]) for rows in _pieces(flat))


def copy_and_sum(target: np.ndarray, source: np.ndarray, dtype: str) -> int:
    """Copy float32, or what has the dtype of ``target``, given by name, and return the sum of the bits there then.

    The sum is not yet modulo the width of an element.
    """
    if target.flags.c_contiguous and source.flags.c_contiguous:
        target, source = target.reshape(-1), source.reshape(-1)
    is_other, checksum = source.dtype != target.dtype, 0
    for rows in _pieces(source):
        piece = convert_dtype(source[rows], dtype_name(source), dtype) if is_other else source[rows]
        np.copyto(target[rows], piece)
        checksum += sum_bits(target[rows])
    return checksum


def _pieces(array: np.ndarray) -> Iterator[slice]:
    """Cut ``array`` along its first axis into pieces that fit the cache."""
    if array.size:
        num_rows = max(1, _PIECE_BYTES // (array.nbytes // len(array)))
        for start in range(0, len(array), num_rows):
            yield slice(start, start + num_rows)
