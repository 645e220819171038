"""MindSpore's ckpt format, written and read without MindSpore.

It is the protobuf message `Checkpoint` of MindSpore's `checkpoint.proto`, read here from a mapping because MindSpore's
own reader wants the whole file in memory.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.weights.file_writer import FileLayout
from mindrlhf.weights.safetensors_file import release_pages
from mindrlhf.weights.tensors import TensorInfo

_CKPT_TYPES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16", "int32": "Int32"}
_DTYPE_OF_CKPT_TYPE = {code: dtype for dtype, code in _CKPT_TYPES.items()}
# MindSpore splits larger parameters into several records of one name (`SLICE_SIZE` of its serialization).
_MAX_RECORD_BYTES = 512 * 2**20
# Keys of protobuf fields of the wire type "length-delimited", by field number, and of dims (number 1, a varint).
_FIELD_1, _FIELD_2, _FIELD_3, _DIMS = 0x0A, 0x12, 0x1A, 0x08


class CkptFile:
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
        self._infos: dict[str, TensorInfo] = {}
        self._places: dict[str, list[tuple[int, int]]] = {}
        try:
            for info, place in _read_records(memoryview(self._map)):
                self._infos[info.name] = info
                self._places.setdefault(info.name, []).append(place)
            for name, info in self._infos.items():
                if sum(stop - start for start, stop in self._places[name]) != info.size_bytes:
                    raise ValueError(f"{name} has not the size of its shape")
        except (ValueError, IndexError, KeyError) as error:
            raise UserError(f"{self.path} is truncated or no ckpt file ({error}): copy it again") from error

    def names(self) -> list[str]:
        """Names of the arrays, in the order of the file."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]

    def read(self, name: str) -> np.ndarray:
        """The array; bfloat16 as uint16 bit patterns. A copy, because the format does not align data."""
        info = self._infos[name]
        data = np.concatenate([self._map[start:stop] for start, stop in self._places[name]])
        return data.view(info.numpy_dtype).reshape(info.shape)

    def release(self, name: str) -> None:
        """Give back the memory that maps an array's data."""
        for start, stop in self._places[name]:
            release_pages(self._map, start, stop)


def ckpt_layout(infos: Iterable[TensorInfo]) -> FileLayout:
    """Lay out a file of these tensors, in their order."""
    by_name = {info.name: info for info in infos}
    frames: list[tuple[int, bytes]] = []
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in by_name}
    position = 0
    for name, info in by_name.items():
        remaining = info.size_bytes
        while remaining or not places[name]:
            size_bytes = min(remaining, _MAX_RECORD_BYTES)
            frame = _record_head(info, size_bytes)
            frames.append((position, frame))
            places[name].append((position + len(frame), size_bytes))
            position += len(frame) + size_bytes
            remaining -= size_bytes
    return FileLayout(frames, by_name, places, position)


def _record_head(info: TensorInfo, size_bytes: int) -> bytes:
    """The message of one array (`Checkpoint.value`) up to its data, which ends it."""
    tensor = b"".join(bytes([_DIMS]) + _varint(size) for size in info.shape)
    tensor += _field(_FIELD_2, _CKPT_TYPES[info.dtype].encode()) + bytes([_FIELD_3]) + _varint(size_bytes)
    value = _field(_FIELD_1, info.name.encode()) + bytes([_FIELD_2]) + _varint(len(tensor) + size_bytes) + tensor
    return bytes([_FIELD_1]) + _varint(len(value) + size_bytes) + value


def _field(key: int, content: bytes) -> bytes:
    return bytes([key]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _read_records(data: memoryview) -> Iterator[tuple[TensorInfo, tuple[int, int]]]:
    """Yield info and (start, stop) of the data of every record."""
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
        yield TensorInfo(name, dtype, tuple(shape)), place


def _fields(data: memoryview, start: int, stop: int, known: set[int]) -> Iterator[tuple[int, int, int]]:
    while start < stop:
        start, field = _read_field(data, start, stop, known)
        yield field


def _read_field(data: memoryview, position: int, end: int, known: set[int]) -> tuple[int, tuple[int, int, int]]:
    """Return the end of the field, and its key with the (start, stop) of its content."""
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
