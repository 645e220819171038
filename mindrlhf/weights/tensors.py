"""Descriptions of tensors: name, dtype and shape; the dtypes of files; alignment in memory.

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

# NumPy has no bfloat16: those tensors are held as their bit patterns, uint16.
_BFLOAT16 = np.dtype(np.uint16)
FLOAT8 = "float8_e4m3"  # nor this, uint8; it is read only, see `mindrlhf.weights.fp8`
_BIT_PATTERNS = {"bfloat16": _BFLOAT16, FLOAT8: np.dtype(np.uint8)}
# Of weights.
STORAGE_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": _BFLOAT16}
# Of weights, and of the step count of an optimiser.
SHARD_DTYPES = {**STORAGE_DTYPES, "int32": np.dtype(np.int32)}
_ALIGNMENT_BYTES = 64


class TensorInfo(NamedTuple):
    """Name, dtype name ("float32", "bfloat16", ...) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype of the arrays to write and read; bfloat16 is handled as its uint16 bits."""
        return _BIT_PATTERNS.get(self.dtype) or np.dtype(self.dtype)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.numpy_dtype.itemsize


def array_infos(arrays: Mapping[str, np.ndarray]) -> list[TensorInfo]:
    """Describe named arrays; uint16 is itself here, not bfloat16."""
    return [TensorInfo(name, array_dtype_name(array.dtype), array.shape) for name, array in arrays.items()]


def array_dtype_name(dtype: np.dtype) -> str:
    """NumPy's name of numbers and booleans in the machine's byte order, its code of anything else."""
    return dtype.name if dtype.isnative and dtype.kind in "biuf" else dtype.str


def dtype_name(array: np.ndarray) -> str:
    """Name of the dtype of weights that an array stores; uint16 stands for bfloat16."""
    return next(name for name, dtype in STORAGE_DTYPES.items() if dtype == array.dtype)


def convert_dtype(array: np.ndarray, source: str, target: str) -> np.ndarray:
    """Convert between dtypes given by name; bfloat16 is rounded to nearest even. The array itself when they agree."""
    if source == target:
        return array
    if source == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if target != "bfloat16":
        return array.astype(STORAGE_DTYPES[target])
    return _round_to_bfloat16(np.ascontiguousarray(array, dtype=np.float32))


def _round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    bits = array.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    rounded = rounded.astype(np.uint16)
    is_nan = np.isnan(array)
    if is_nan.any():
        # Rounding a NaN could carry into infinity: keep its upper half and make it quiet.
        rounded[is_nan] = (bits[is_nan] >> 16) | 0x40
    return rounded


def align(offset: int) -> int:
    """Return the next place, in bytes, at which a tensor may begin."""
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def with_low_rank(weight: np.ndarray, down: np.ndarray, up: np.ndarray, scale: float) -> np.ndarray:
    """Return W + s B A in the dtype of ``weight``, computed in float32."""
    dtype = dtype_name(weight)
    added = np.matmul(up, down)
    added *= np.float32(scale)
    added += convert_dtype(weight, dtype, "float32")
    return convert_dtype(added, "float32", dtype)
