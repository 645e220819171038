"""Slices of tensors: what two have in common, and the sums of their bits.

A slice is (start, stop) per axis. By the sums, what was written is compared with what lies in memory elsewhere.

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

import math
from collections.abc import Sequence

import numpy as np

from mindrlhf.weights.tensors import convert_dtype, dtype_name

TensorSlice = tuple[tuple[int, int], ...]

# Memory is copied and summed in chunks, so that the sum finds the chunk in the cache.
_CHUNK_BYTES = 1 << 20


def to_slice(bounds: Sequence[Sequence[int]]) -> TensorSlice:
    """Return bounds, lists where they came from another process, as a slice."""
    return tuple((int(start), int(stop)) for start, stop in bounds)


def to_index(bounds: Sequence[Sequence[int]]) -> tuple:
    """Return the index of a slice in an array; the ellipsis keeps what has no axes a view."""
    return (*(slice(start, stop) for start, stop in bounds), ...)


def whole_slice(shape: Sequence[int]) -> TensorSlice:
    return tuple((0, size) for size in shape)


def num_elements(bounds: TensorSlice) -> int:
    """Return the size of a slice; that of a scalar, which has no axes, is 1."""
    return math.prod(stop - start for start, stop in bounds)


def intersect(bounds: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """Return what two slices of one tensor have in common, None where that is nothing."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(bounds, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def sum_bits(array: np.ndarray) -> int:
    """Return the sum of the elements' bits, modulo the width of an element."""
    words = array.view(f"<u{array.dtype.itemsize}")
    return int(np.add.reduce(words, axis=None, dtype=words.dtype))


def copy_and_sum(target: np.ndarray, source: np.ndarray, dtype: str) -> int:
    """Copy float32, or what has the dtype of ``target``, given by name, and return the sum of the bits there then.

    The sum is not yet modulo the width of an element.
    """
    if target.flags.c_contiguous and source.flags.c_contiguous:
        target, source = target.reshape(-1), source.reshape(-1)
    is_other, checksum = source.dtype != target.dtype, 0
    if source.size:
        num_rows = max(1, _CHUNK_BYTES // (source.nbytes // len(source)))
        for start in range(0, len(source), num_rows):
            rows = slice(start, start + num_rows)
            chunk = convert_dtype(source[rows], dtype_name(source), dtype) if is_other else source[rows]
            np.copyto(target[rows], chunk)
            checksum += sum_bits(target[rows])
    return checksum
