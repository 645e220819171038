"""Arrays of any plain dtype in one safetensors file, written and read one array at a time.

Written here because the format's Python API wants all arrays of a file in memory at once; read with that API. The
format: 8 bytes of little-endian header length, a JSON header, then the data of the arrays without gaps.
"""

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mindrlhf.errors import UserError
from mindrlhf.weights.direct_file import DirectFile, OrderedChecksum

_CODES = {
    np.dtype(name): code
    for name, code in {
        "<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
        "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL",
    }.items()
}  # fmt: skip
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class ArrayInfo:
    """Dtype and shape of an array that will be written."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the data."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def save_arrays(path: Path, arrays: Iterable[tuple[str, np.ndarray]], infos: Mapping[str, ArrayInfo]) -> str | None:
    """Write a safetensors file as a stream; it appears under its name whole or not at all.

    Args:
        path: the file; replaced when it is there.
        arrays: (name, array), exactly those of ``infos``, in any order; each is written before the next is drawn.
        infos: what will come: the header is written first. Little-endian numbers and booleans.

    Returns:
        The file's checksum, XXH3-64 in hex; None if the arrays did not come in the order of the file, which is that
        of ``infos`` with wider elements first.

    Raises:
        OSError: the disk refuses.
    """
    header, positions = _layout(infos)
    size_bytes = len(header) + sum(info.size_bytes for info in infos.values())
    checksum = OrderedChecksum()
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with DirectFile(temporary, size_bytes) as file:
            file.write(memoryview(header), 0, checksum.taker(0))
            for name, array in arrays:
                assert name in positions, f"array {name!r} is not in the infos, or came twice"
                info = infos[name]
                assert array.dtype == info.dtype, f"array {name!r} comes as {array.dtype}, not {info.dtype}"
                assert array.shape == info.shape, f"array {name!r} comes with shape {array.shape}, not {info.shape}"
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                position = positions.pop(name)
                file.write(data, position, checksum.taker(position))
            assert not positions, f"{len(positions)} arrays did not come, {next(iter(positions))!r} first"
            file.sync()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return checksum.value(size_bytes)


def _layout(infos: Mapping[str, ArrayInfo]) -> tuple[bytes, dict[str, int]]:
    """Return the length prefix with the header, and each array's position in the file."""
    entries: dict[str, dict] = {}
    end = 0
    # Wide elements first: each array then starts at a multiple of its element size.
    for name, info in sorted(infos.items(), key=lambda item: -np.dtype(item[1].dtype).itemsize):
        assert name != "__metadata__", "the format keeps the name '__metadata__' for itself"
        code = _CODES.get(np.dtype(info.dtype))
        assert code, f"array {name!r} is {info.dtype}: only little-endian numbers and booleans can be written"
        start, end = end, end + info.size_bytes
        entries[name] = {"dtype": code, "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}


class ArrayFile(Mapping[str, np.ndarray]):
    """The arrays of a safetensors file by name; each is read, as a copy of its own, when it is asked for."""

    def __init__(self, path: Path):
        self.path = path
        with self._reading():
            self._file: Any = safe_open(str(path), framework="numpy")
            self._infos = {name: self._file.get_slice(name) for name in self._file.offset_keys()}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._infos:
            raise KeyError(name)
        with self._reading():
            return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array without reading it."""
        return tuple(self._infos[name].get_shape())

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except SafetensorError as error:
            raise UserError(f"{self.path} is damaged: {error}") from error
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from error


def load_arrays(path: Path) -> ArrayFile:
    """Open a safetensors file written by :func:`save_arrays`.

    Raises:
        UserError: the file is missing, or no whole safetensors file.
    """
    return ArrayFile(path)
