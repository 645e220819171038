"""The files of a sharded directory: named arrays in safetensors or MindSpore's ckpt format, written in any order.

Both formats put the description of an array before its data, so all positions are known before any data is; the
writers of several ranks' files can then be filled tensor by tensor. MindSpore's format is the protobuf message
`Checkpoint` of its `checkpoint.proto`, read here from a mapping because its own reader wants the whole file in memory.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from mindrlhf.errors import UserError
from mindrlhf.system.files import partial_path, put_in_place
from mindrlhf.weights.direct_file import DirectFile, OrderedChecksum
from mindrlhf.weights.hf import FILE_CODES, STORAGE_DTYPES, SafetensorsFile, release_pages

FILE_FORMATS = ("safetensors", "ckpt")
# Weights, and the step count of an optimiser.
SHARD_DTYPES = {**STORAGE_DTYPES, "int32": np.dtype(np.int32)}
_FILE_CODES = {**FILE_CODES, "int32": "I32"}
_CKPT_TYPES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16", "int32": "Int32"}
_DTYPE_OF_CKPT_TYPE = {code: dtype for dtype, code in _CKPT_TYPES.items()}
_ALIGNMENT_BYTES = 8
# MindSpore cuts larger parameters into several records of one name (`SLICE_SIZE` of its serialization).
_MAX_RECORD_BYTES = 512 * 2**20
# Keys of protobuf fields of the wire type "length-delimited", by field number, and of dims (number 1, a varint).
_FIELD_1, _FIELD_2, _FIELD_3, _DIMS = 0x0A, 0x12, 0x1A, 0x08


@dataclass(frozen=True)
class ArrayInfo:
    """Dtype name (`float32`, `float16`, `bfloat16`, `int32`) and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype of arrays in memory; bfloat16 is held as its uint16 bits."""
        return SHARD_DTYPES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.numpy_dtype.itemsize


def checksum(array: np.ndarray) -> str:
    """XXH3-64 (xxhash.com) of a contiguous array's bytes, in hex: it finds damage and mistakes, not an attacker."""
    return xxhash.xxh3_64_hexdigest(array.reshape(-1).view(np.uint8).data)


class ShardWriter:
    """One file that is filled in any order and by several threads; it appears under its name only by `finish`.

    Raises:
        OSError: the disk refuses.
    """

    def __init__(self, path: Path, infos: Mapping[str, ArrayInfo], file_format: str):
        self.path = path
        self._infos = infos
        self._partial = partial_path(path)
        frames, self._places, self.size_bytes = _LAYOUTS[file_format](infos)
        self._file = DirectFile(self._partial, self.size_bytes)
        self._checksum = OrderedChecksum()
        try:
            for offset, frame in frames:
                self._file.write(memoryview(frame), offset, self._checksum.taker(offset))
        except OSError:
            self.discard()
            raise

    def write(self, name: str, array: np.ndarray) -> str:
        """Write the data of an array, which must be contiguous and as its info says; return its checksum."""
        info = self._infos[name]
        assert array.flags.c_contiguous, f"array {name!r} is not contiguous"
        assert (array.dtype, array.shape) == (info.numpy_dtype, info.shape), (
            f"array {name!r} comes as {array.dtype} {array.shape}, not {info.numpy_dtype} {info.shape}"
        )
        data = memoryview(array.reshape(-1).view(np.uint8))
        digest = xxhash.xxh3_64()
        for offset, size_bytes in self._places[name]:
            self._file.write(data[:size_bytes], offset, digest.update, self._checksum.taker(offset))
            data = data[size_bytes:]
        return digest.hexdigest()

    def finish(self) -> str | None:
        """Force the data to the disk and give the file its name; return its checksum if it was written in order."""
        self._file.close()
        put_in_place(self._partial, self.path)
        return self._checksum.value(self.size_bytes)

    def discard(self) -> None:
        """Remove what was written; nothing happens after `finish`."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


def file_size_bytes(infos: Mapping[str, ArrayInfo], file_format: str) -> int:
    """Size of the file that holds these arrays."""
    return _LAYOUTS[file_format](infos)[2]


class ShardSafetensors(SafetensorsFile):
    """A safetensors file of weights and optimiser state."""

    dtypes = SHARD_DTYPES
    file_codes = _FILE_CODES


class ShardCkpt:
    """A MindSpore ckpt file, memory-mapped; the same methods as `SafetensorsFile`.

    Raises:
        UserError: the file is missing, truncated or no ckpt file.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            self._map = np.memmap(self.path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{self.path} is empty: copy it again, or shard again") from error
        self._infos: dict[str, ArrayInfo] = {}
        self._places: dict[str, list[tuple[int, int]]] = {}
        try:
            for name, info, place in _read_records(memoryview(self._map)):
                self._infos[name] = info
                self._places.setdefault(name, []).append(place)
            for name, info in self._infos.items():
                if sum(stop - start for start, stop in self._places[name]) != info.size_bytes:
                    raise ValueError(f"{name} has not the size of its shape")
        except (ValueError, IndexError, KeyError) as error:
            raise UserError(f"{self.path} is truncated or no ckpt file ({error}): copy it again") from error

    def names(self) -> list[str]:
        """Names of the arrays, in the order of the file."""
        return list(self._infos)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype name and shape of an array."""
        return self._infos[name].dtype, self._infos[name].shape

    def read(self, name: str) -> np.ndarray:
        """The array; bfloat16 as uint16 bit patterns. A copy, because the format does not align data."""
        info = self._infos[name]
        data = np.concatenate([self._map[start:stop] for start, stop in self._places[name]])
        return data.view(info.numpy_dtype).reshape(info.shape)

    def release(self, name: str) -> None:
        """Give back the memory that maps an array's data."""
        for start, stop in self._places[name]:
            release_pages(self._map, start, stop)


def open_shard(path: Path, file_format: str) -> ShardSafetensors | ShardCkpt:
    """Open a rank's file.

    Raises:
        UserError: it is missing or damaged.
    """
    return ShardSafetensors(path) if file_format == "safetensors" else ShardCkpt(path)


Frames = list[tuple[int, bytes]]
Places = dict[str, list[tuple[int, int]]]


def _layout_safetensors(infos: Mapping[str, ArrayInfo]) -> tuple[Frames, Places, int]:
    """What stands around the data with its position, (position, bytes) of each array's data, and the file's size."""
    entries: dict[str, dict] = {"__metadata__": {"format": "ms"}}
    end = 0
    # Wide elements first: each array then starts at a multiple of its element size.
    for name, info in sorted(infos.items(), key=lambda item: -item[1].numpy_dtype.itemsize):
        start, end = end, end + info.size_bytes
        entries[name] = {
            "dtype": _FILE_CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    header = struct.pack("<Q", len(text)) + text
    places = {name: [(len(header) + entries[name]["data_offsets"][0], infos[name].size_bytes)] for name in infos}
    return [(0, header)], places, len(header) + end


def _layout_ckpt(infos: Mapping[str, ArrayInfo]) -> tuple[Frames, Places, int]:
    frames: Frames = []
    places: Places = {name: [] for name in infos}
    position = 0
    for name, info in infos.items():
        remaining = info.size_bytes
        while remaining or not places[name]:
            size_bytes = min(remaining, _MAX_RECORD_BYTES)
            frame = _record_head(name, info, size_bytes)
            frames.append((position, frame))
            places[name].append((position + len(frame), size_bytes))
            position += len(frame) + size_bytes
            remaining -= size_bytes
    return frames, places, position


_LAYOUTS = {"safetensors": _layout_safetensors, "ckpt": _layout_ckpt}


def _record_head(name: str, info: ArrayInfo, size_bytes: int) -> bytes:
    """The message of one array (`Checkpoint.value`) up to its data, which ends it."""
    tensor = b"".join(bytes([_DIMS]) + _varint(size) for size in info.shape)
    tensor += _field(_FIELD_2, _CKPT_TYPES[info.dtype].encode()) + bytes([_FIELD_3]) + _varint(size_bytes)
    value = _field(_FIELD_1, name.encode()) + bytes([_FIELD_2]) + _varint(len(tensor) + size_bytes) + tensor
    return bytes([_FIELD_1]) + _varint(len(value) + size_bytes) + value


def _field(key: int, content: bytes) -> bytes:
    return bytes([key]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _read_records(data: memoryview) -> Iterator[tuple[str, ArrayInfo, tuple[int, int]]]:
    """Yield name, info and (start, stop) of the data of every record."""
    position = 0
    while position < len(data):
        position, (_, *record) = _read_field(data, position, len(data), {_FIELD_1})
        place = (position, position)
        name, dtype, shape = "", "", []
        for key, start, stop in _fields(data, *record, {_FIELD_1, _FIELD_2}):
            if key == _FIELD_1:
                name = bytes(data[start:stop]).decode()
                continue
            for inner, first, last in _fields(data, start, stop, {_DIMS, _FIELD_2, _FIELD_3}):
                if inner == _DIMS:
                    shape.append(_read_varint(data, first)[0])
                elif inner == _FIELD_2:
                    dtype = _DTYPE_OF_CKPT_TYPE[bytes(data[first:last]).decode()]
                else:
                    place = (first, last)
        yield name, ArrayInfo(dtype, tuple(shape)), place


def _fields(data: memoryview, start: int, stop: int, known: set[int]) -> Iterator[tuple[int, int, int]]:
    while start < stop:
        start, field = _read_field(data, start, stop, known)
        yield field


def _read_field(data: memoryview, position: int, end: int, known: set[int]) -> tuple[int, tuple[int, int, int]]:
    """Where the field ends, and its key with the (start, stop) of its content."""
    key = data[position]
    if key not in known:
        raise ValueError(f"byte {position} begins no known field")
    if key == _DIMS:
        stop = _read_varint(data, position + 1)[1]
        return stop, (key, position + 1, stop)
    size_bytes, start = _read_varint(data, position + 1)
    if start + size_bytes > end:
        raise ValueError(f"{start + size_bytes - end} bytes are missing")
    return start + size_bytes, (key, start, start + size_bytes)


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
