"""The safetensors format, written and read: the only place that knows it.

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
_MAX_HEADER_BYTES = 32 << 20  # some 200,000 tensors; parsed it takes many times its size
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

    Args:
        path: the file.
        dtypes: names of those that it may hold.

    Raises:
        UserError: the file is missing, truncated or not a safetensors file.
    """

    def __init__(self, path: str | os.PathLike, dtypes: Iterable[str] = STORAGE_DTYPES):
        self.path = Path(path)
        self._dtype_of_code = {_CODES[name]: name for name in dtypes}
        try:
            size_bytes = self.path.stat().st_size
            with open(self.path, "rb") as file:
                prefix = file.read(8)
                header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
                if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size_bytes - 8):
                    raise UserError(f"{self.path} is not a safetensors file, or is truncated: download it again")
                header = json.loads(file.read(header_bytes))
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.path} has a damaged safetensors header: download it again") from error
        if not isinstance(header, dict):
            raise UserError(f"{self.path} has a damaged safetensors header: download it again")
        self.metadata = header.pop("__metadata__", {})
        self._data_start = 8 + header_bytes
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for name, entry in header.items():
            self._add_entry(name, entry, size_bytes - self._data_start)
        self._check_places(size_bytes)
        self._map = np.memmap(self.path, dtype=np.uint8, mode="r") if header else np.empty(0, np.uint8)

    def _add_entry(self, name: str, entry: object, data_bytes: int) -> None:
        code = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(code, str) or code not in self._dtype_of_code:
            raise UserError(f"{self.path}: tensor {name!r} is not {', '.join(self._dtype_of_code)}")
        shape, place = entry.get("shape"), entry.get("data_offsets")
        if not (_is_sizes(shape) and len(shape) <= _MAX_DIMENSIONS and _is_sizes(place) and len(place) == 2):
            raise UserError(f"{self.path}: tensor {name!r} has a damaged shape or offsets: download it again")
        info, (start, end) = TensorInfo(name, self._dtype_of_code[code], tuple(shape)), place
        if end > data_bytes:
            raise UserError(f"{self.path} is truncated at tensor {name!r}: download it again")
        # NumPy's sizes would wrap around where one of them is zero.
        largest_bytes = math.prod(max(size, 1) for size in shape) * info.numpy_dtype.itemsize
        if largest_bytes >= 2**63 or end - start != info.size_bytes:
            raise UserError(f"{self.path}: tensor {name!r} has damaged offsets: download it again")
        self._infos[name], self._places[name] = info, (self._data_start + start, self._data_start + end)

    def _check_places(self, size_bytes: int) -> None:
        """Check that the data of the tensors fill the file, without gaps: the format wants it so."""
        places = sorted((start, end, name) for name, (start, end) in self._places.items())
        before = [(0, self._data_start, ""), *places]
        for (_, end, name), (start, _, other) in zip(before, places):
            if start < end:
                raise UserError(f"{self.path}: tensors {name!r} and {other!r} overlap: download it again")
            if start > end:
                raise UserError(f"{self.path} has a gap before tensor {other!r}: download it again")
        if before[-1][1] != size_bytes:
            raise UserError(f"{self.path} has data behind its last tensor: download it again")

    def names(self) -> list[str]:
        """Tensor names, in the order of the header."""
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


def _is_sizes(value: object) -> bool:
    """Whether a value of a JSON header is a list of integers that are not negative."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def release_pages(mapped: np.memmap, start: int, end: int) -> None:
    """Drop the whole pages between two positions of a mapped file; they are read again when they are used again."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if end - first >= mmap.PAGESIZE:
        mapped._mmap.madvise(mmap.MADV_DONTNEED, first, (end - first) // mmap.PAGESIZE * mmap.PAGESIZE)
