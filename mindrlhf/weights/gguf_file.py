"""The GGUF format, read within bounds: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

Little-endian: a header with the counts, metadata (name, type, value), the tensors (name, sizes, type, place), their
data. The package `gguf` undoes the quantisation. Its own reader makes an array of each value, which takes seconds for a
vocabulary, and follows the counts of a damaged file beyond its end.
"""

import math
import os
import struct
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.weights.safetensors_file import release_pages

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
# Types whose numbers are stored as they are, by name.
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Value = int | float | bool | str | list[str] | np.ndarray


class GgufTensor(NamedTuple):
    """One tensor: the name of its type (`F32`, `Q4_1`, ...), shape as NumPy has it, place of its data in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def dtype(self) -> str:
        """Name of the dtype that it is read as: its own, or float32 where it is quantised."""
        return _STORED.get(self.kind, "float32")


class GgufFile:
    """One GGUF file, memory-mapped.

    Attributes:
        path: the file.
        metadata: value by name; arrays of numbers are NumPy's, arrays of texts lists.
        tensors: by name.

    Raises:
        UserError: the file is missing, no GGUF, damaged, or the package `gguf` is not there.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._gguf = _library()
        try:
            self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise UserError(f"{self.path} cannot be read as GGUF: {error}") from error
        self._place = 0
        if bytes(self._take(4)) != _MAGIC:
            raise UserError(f"{self.path} is not a GGUF file")
        version = self._number("<u4")
        if version not in _VERSIONS:
            raise UserError(
                f"{self.path} is GGUF of version {version}, or big-endian: only 2 and 3, little-endian, are read"
            )
        num_tensors, num_values = self._number("<u8"), self._number("<u8")
        self.metadata: dict[str, Value] = {}
        for _ in range(num_values):
            name = self._text()
            if name in self.metadata:
                raise self._damage(f"{name!r} twice")
            self.metadata[name] = self._value(self._number("<u4"))
        found = [self._tensor() for _ in range(num_tensors)]
        self.tensors = self._placed(found)

    def read(self, name: str) -> np.ndarray:
        """The tensor in its `dtype`: of stored numbers a read-only view, bfloat16 as uint16 bit patterns.

        Raises:
            UserError: it holds what is no number, or is of a type that the package cannot undo.
        """
        tensor = self.tensors[name]
        raw = self._bytes[tensor.start : tensor.start + tensor.num_bytes]
        if tensor.kind in _STORED:
            numpy_dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.kind]
            array = np.asarray(raw if tensor.start % 4 == 0 else raw.copy()).view(numpy_dtype).reshape(tensor.shape)
        else:
            rows = np.asarray(raw).reshape(*tensor.shape[:-1], -1)
            try:
                array = self._gguf.dequantize(rows, self._gguf.GGMLQuantizationType[tensor.kind])
            except NotImplementedError as error:
                raise UserError(f"{self.path}: tensor {name!r} is of type {tensor.kind}, which is not read") from error
        is_finite = (array & 0x7F80 != 0x7F80) if tensor.kind == "BF16" else np.isfinite(array)
        if not is_finite.all():
            raise UserError(f"{self.path}: tensor {name!r} holds values that are no numbers: download it again")
        return array

    def release(self, name: str) -> None:
        """Give back the memory that maps a tensor; see `SafetensorsFile.release`."""
        tensor = self.tensors[name]
        release_pages(self._bytes, tensor.start, tensor.start + tensor.num_bytes)

    def _damage(self, what: str) -> UserError:
        return UserError(f"{self.path} is damaged, it has {what}: download it again")

    def _take(self, size: int) -> np.ndarray:
        if size > len(self._bytes) - self._place:
            raise self._damage("less data than its header states")
        self._place += size
        return self._bytes[self._place - size : self._place]

    def _number(self, dtype: str) -> int | float | bool:
        return self._take(np.dtype(dtype).itemsize).view(dtype)[0].item()

    def _text(self) -> str:
        # In one piece: a vocabulary has hundreds of thousands.
        end = self._place + 8
        size = struct.unpack_from("<Q", self._bytes, self._place)[0] if end <= len(self._bytes) else 2**64
        self._take(8)
        try:
            return bytes(self._take(size)).decode()
        except UnicodeDecodeError as error:
            raise self._damage(f"a text that is not UTF-8 ({error.reason})") from error

    def _value(self, kind: int) -> Value:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise self._damage(f"a value of the unknown type {kind}")
        item, count = self._number("<u4"), self._number("<u8")
        if item == _STRING:
            return [self._text() for _ in range(count)]
        if item not in _SCALARS:
            raise self._damage(f"an array of the type {item}")
        return self._take(count * np.dtype(_SCALARS[item]).itemsize).view(_SCALARS[item])

    def _tensor(self) -> tuple[str, GgufTensor]:
        """Name and description, whose place is still counted from the beginning of all data."""
        name, num_dimensions = self._text(), self._number("<u4")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damage(f"tensor {name!r} with {num_dimensions} axes")
        # The innermost axis comes first.
        shape = tuple(self._number("<u8") for _ in range(num_dimensions))[::-1]
        number, start = self._number("<u4"), self._number("<u8")
        try:
            kind = self._gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise self._damage(f"tensor {name!r} of the unknown type {number}") from error
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block or math.prod(shape) >= 2**60:
            raise self._damage(f"tensor {name!r} of type {kind.name} with the sizes {list(shape)}")
        return name, GgufTensor(kind.name, shape, start, math.prod(shape) // block * block_bytes)

    def _placed(self, found: list[tuple[str, GgufTensor]]) -> dict[str, GgufTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._damage(f"general.alignment = {alignment!r}")
        begin = -(-self._place // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        for name, tensor in found:
            if name in placed:
                raise self._damage(f"tensor {name!r} twice")
            if tensor.start % alignment or begin + tensor.start + tensor.num_bytes > len(self._bytes):
                raise self._damage(f"tensor {name!r} beyond its end, or off its alignment")
            placed[name] = tensor._replace(start=begin + tensor.start)
        in_order = sorted((tensor.start, tensor.start + tensor.num_bytes, name) for name, tensor in placed.items())
        for (_, end, name), (start, _, other) in zip(in_order, in_order[1:]):
            if start < end:
                raise self._damage(f"tensors {name!r} and {other!r} in one place")
        return placed


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise UserError("GGUF files are read with the package gguf, which is not there: pip install gguf") from error
    return gguf
