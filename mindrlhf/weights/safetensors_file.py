"""Safetensors files: read through the library's checks of their header, written as a stream, which it does not do.

8 bytes of little-endian header length, a JSON header, then the data of the tensors without gaps.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from mindrlhf.errors import UserError
from mindrlhf.weights.file_writer import FileLayout
from mindrlhf.weights.tensors import FLOAT8, STORAGE_DTYPES, TensorInfo

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    FLOAT8: "F8_E4M3",
}  # fmt: skip
ARRAY_DTYPES = tuple(name for name in _CODES if name not in ("bfloat16", FLOAT8))  # those that NumPy has too
_ALIGNMENT_BYTES = 8
_MAX_DIMENSIONS = 32  # of a NumPy array


def safetensors_layout(infos: Iterable[TensorInfo], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Lay out a file of these tensors, in their order.

    Args:
        metadata: becomes the `__metadata__` of the header.
    """
    entries: dict[str, dict] = {"__metadata__": dict(metadata)} if metadata else {}
    by_name = {info.name: info for info in infos}
    end = 0
    for name, info in by_name.items():
        assert name != "__metadata__", "the format keeps the name '__metadata__' for itself"
        code = _CODES.get(info.dtype)
        assert code, f"array {name!r} is {info.dtype}: only little-endian numbers and booleans can be written"
        start, end = end, end + info.size_bytes
        entries[name] = {"dtype": code, "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    header = struct.pack("<Q", len(text)) + text
    places = {name: [(len(header) + entries[name]["data_offsets"][0], by_name[name].size_bytes)] for name in by_name}
    return FileLayout([(0, header)], by_name, places, len(header) + end)


def wide_first(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Order tensors so that each starts at a multiple of its element size."""
    return sorted(infos, key=lambda info: -info.numpy_dtype.itemsize)


class SafetensorsFile:
    """One safetensors file, memory-mapped: tensors are read-only views of the file.

    Raises:
        UserError: the file is missing, truncated or not a safetensors file.
    """

    def __init__(self, path: str | os.PathLike, dtypes: Iterable[str] = STORAGE_DTYPES):
        self.path = Path(path)
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[int, int]] = {}
        dtype_of_code = {_CODES[name]: name for name in dtypes}
        try:
            with safe_open(self.path, "numpy") as file:
                # In the order of their data, which fill the file behind the header without gaps.
                slices = {name: file.get_slice(name) for name in file.offset_keys()}
                for name, part in slices.items():
                    self._add(name, dtype_of_code.get(part.get_dtype()), part.get_shape(), list(dtype_of_code))
            size_bytes = self.path.stat().st_size
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error}") from error
        except SafetensorError as error:
            is_pointer = np.fromfile(self.path, np.uint8, 12).tobytes() == b"version http"
            fix = "it is a pointer, git lfs pull gets the file" if is_pointer else "download it again"
            raise UserError(f"{self.path} is no safetensors file, or is truncated ({error}): {fix}") from error
        start = size_bytes - sum(info.size_bytes for info in self._infos.values())
        for name, info in self._infos.items():
            self._places[name] = (start, start + info.size_bytes)
            start += info.size_bytes
        self._map = np.memmap(self.path, dtype=np.uint8, mode="r")

    def _add(self, name: str, dtype: str | None, shape: list[int], codes: list[str]) -> None:
        if dtype is None:
            raise UserError(f"{self.path}: tensor {name!r} is not {', '.join(codes)}")
        info = TensorInfo(name, dtype, tuple(shape))
        # NumPy's sizes would wrap around where one of them is zero.
        largest_bytes = math.prod(max(size, 1) for size in shape) * info.numpy_dtype.itemsize
        if len(shape) > _MAX_DIMENSIONS or largest_bytes >= 2**63:
            raise UserError(f"{self.path}: tensor {name!r} has a damaged shape: download it again")
        self._infos[name] = info

    def names(self) -> list[str]:
        """Tensor names, in the order of their data."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Name, dtype and shape of a tensor, from the header alone."""
        return self._infos[name]

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file; bfloat16 as uint16 bit patterns."""
        info, (start, end) = self._infos[name], self._places[name]
        raw = self._map[start:end]
        if start % info.numpy_dtype.itemsize:
            raw = raw.copy()
        return np.asarray(raw).view(info.numpy_dtype).reshape(info.shape)

    def release(self, name: str) -> None:
        """Give back the memory that maps a tensor, so that a reader never holds a whole model; views stay valid."""
        release_pages(self._map, *self._places[name])


def release_pages(mapped: np.memmap, start: int, end: int) -> None:
    """Drop the whole pages between two positions of a mapped file; they are read again when they are used again."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if end - first >= mmap.PAGESIZE:
        mapped._mmap.madvise(mmap.MADV_DONTNEED, first, (end - first) // mmap.PAGESIZE * mmap.PAGESIZE)
