"""Hugging Face model directories: config.json and safetensors files, read lazily and written as a stream."""

import itertools
import json
import math
import mmap
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Container
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# NumPy has no bfloat16: those tensors are held as their bit patterns, uint16.
STORAGE_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
FILE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# In a directory with this file the tensors lie in slices, as `mindrlhf weights shard` wrote them.
SHARDED_NAME = "sharded.json"
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 32  # of a NumPy array


def read_hf_config(model_dir: str | os.PathLike) -> dict:
    """Read `config.json` of a Hugging Face directory.

    Raises:
        UserError: the directory or file is missing, or the file is not a JSON object.
    """
    path = Path(model_dir) / "config.json"
    if not Path(model_dir).is_dir():
        raise UserError(f"model directory {str(model_dir)!r} does not exist: give a Hugging Face model directory")
    if not path.is_file():
        raise UserError(f"{model_dir} has no config.json: give a Hugging Face model directory")
    return read_json_object(path)


def read_json_object(path: Path) -> dict:
    """Read one JSON object; a `UserError` names the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def dtype_name(array: np.ndarray) -> str:
    """Name of the dtype that an array stores; uint16 stands for bfloat16."""
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
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    # Rounding a NaN could carry into infinity: keep its upper half and make it quiet.
    return np.where(np.isnan(array), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


class SafetensorsFile:
    """One safetensors file, memory-mapped: tensors are read-only views of the file.

    Written for the published format: 8 bytes of little-endian header length, a JSON header, the data.

    Attributes:
        dtypes: the dtypes that such a file may hold, by name.
        file_codes: the format's code of each.

    Raises:
        UserError: the file is missing, truncated or not a safetensors file.
    """

    dtypes = STORAGE_DTYPES
    file_codes = FILE_CODES

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
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
        self._dtype_of_code = {code: dtype for dtype, code in self.file_codes.items()}
        self.metadata = header.pop("__metadata__", {})
        self._entries = header
        self._data_start = 8 + header_bytes
        self._check_entries(size_bytes - self._data_start)
        self._map = np.memmap(self.path, dtype=np.uint8, mode="r") if header else np.empty(0, np.uint8)

    def _check_entries(self, data_bytes: int) -> None:
        places = []
        for name, entry in self._entries.items():
            code = entry.get("dtype") if isinstance(entry, dict) else None
            if not isinstance(code, str) or code not in self._dtype_of_code:
                raise UserError(f"{self.path}: tensor {name!r} is not {', '.join(self._dtype_of_code)}")
            shape, place = entry.get("shape"), entry.get("data_offsets")
            if not (_is_sizes(shape) and len(shape) <= _MAX_DIMENSIONS and _is_sizes(place) and len(place) == 2):
                raise UserError(f"{self.path}: tensor {name!r} has a damaged shape or offsets: download it again")
            start, end = place
            if end > data_bytes:
                raise UserError(f"{self.path} is truncated at tensor {name!r}: download it again")
            # NumPy's product would wrap around, and so would its sizes where one of them is zero.
            size_bytes = math.prod(max(size, 1) for size in shape) * self.dtypes[self._dtype_of_code[code]].itemsize
            expected = 0 if 0 in shape else size_bytes
            if size_bytes >= 2**63 or end - start != expected:
                raise UserError(f"{self.path}: tensor {name!r} has damaged offsets: download it again")
            places.append((start, end, name))
        places.sort()
        for (_, end, name), (start, _, other) in itertools.pairwise(places):
            if start < end:
                raise UserError(f"{self.path}: tensors {name!r} and {other!r} overlap: download it again")

    def names(self) -> list[str]:
        """Tensor names, in the order of the header."""
        return list(self._entries)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype name (`float32`, `float16`, `bfloat16`) and shape of a tensor, from the header alone."""
        entry = self._entries[name]
        return self._dtype_of_code[entry["dtype"]], tuple(entry["shape"])

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file; bfloat16 as uint16 bit patterns."""
        dtype_name, shape = self.info(name)
        dtype = self.dtypes[dtype_name]
        start, end = self._place(name)
        raw = self._map[start:end]
        if start % dtype.itemsize:
            raw = raw.copy()
        return np.asarray(raw).view(dtype).reshape(shape)

    def release(self, name: str) -> None:
        """Give back the memory that maps a tensor, so that a reader never holds a whole model; views stay valid."""
        release_pages(self._map, *self._place(name))

    def _place(self, name: str) -> tuple[int, int]:
        start, end = self._entries[name]["data_offsets"]
        return self._data_start + start, self._data_start + end


def _is_sizes(value: object) -> bool:
    """Whether a value of a JSON header is a list of integers that are not negative."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def release_pages(mapped: np.memmap, start: int, end: int) -> None:
    """Drop the whole pages between two positions of a mapped file; they are read again when they are used again."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if end - first >= mmap.PAGESIZE:
        mapped._mmap.madvise(mmap.MADV_DONTNEED, first, (end - first) // mmap.PAGESIZE * mmap.PAGESIZE)


class TensorDirectory(ABC):
    """Logical Hugging Face tensors of a model directory, whatever its files hold."""

    directory: Path

    @abstractmethod
    def names(self) -> list[str]:
        """Every tensor name."""

    @abstractmethod
    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype name and shape of a tensor, without reading it."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor, not to be written to; bfloat16 as uint16 bit patterns."""

    def check_coverage(self, shapes: dict[str, tuple[int, ...]], ignored: Container[str] = frozenset()) -> None:
        """Compare names and shapes with what the model needs, both ways.

        Raises:
            UserError: a tensor is missing, unexpected (and not `ignored`) or has the wrong shape.
        """
        present = set(self.names())
        missing = [name for name in shapes if name not in present]
        if missing:
            raise UserError(f"{self.directory} lacks {_count(missing)} that config.json implies: {_some(missing)}")
        unexpected = [name for name in self.names() if name not in shapes and name not in ignored]
        if unexpected:
            raise UserError(f"{self.directory} has {_count(unexpected)} the model does not know: {_some(unexpected)}")
        for name, shape in shapes.items():
            found = self.info(name)[1]
            if found != tuple(shape):
                raise UserError(
                    f"{self.directory}: tensor {name!r} has shape {list(found)}, but config.json implies {list(shape)}"
                )


def open_tensors(model_dir: str | os.PathLike) -> TensorDirectory:
    """Open a Hugging Face directory, or one that `mindrlhf weights shard` made from such.

    Raises:
        UserError: it is neither, or is damaged.
    """
    if (Path(model_dir) / SHARDED_NAME).is_file():
        from mindrlhf.weights.sharded import ShardedDirectory

        return ShardedDirectory(model_dir)
    return SafetensorsDirectory(model_dir)


class SafetensorsDirectory(TensorDirectory):
    """The safetensors of a model directory, single or sharded with an index; tensors are read lazily.

    Raises:
        UserError: directory missing, no safetensors in it, a shard missing, or an index that does not fit the shards.
    """

    def __init__(self, model_dir: str | os.PathLike):
        self.directory = Path(model_dir)
        if not self.directory.is_dir():
            raise UserError(f"model directory {str(model_dir)!r} does not exist: give a model directory")
        self._files: dict[str, SafetensorsFile] = {}
        index_path = self.directory / INDEX_NAME
        if index_path.is_file():
            self._file_of = self._read_index(index_path)
        elif (self.directory / SINGLE_NAME).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE_NAME).names(), SINGLE_NAME)
        else:
            raise UserError(f"{self.directory} has neither {SINGLE_NAME} nor {INDEX_NAME}: only safetensors are read")

    def _open(self, file_name: str) -> SafetensorsFile:
        if file_name not in self._files:
            self._files[file_name] = SafetensorsFile(self.directory / file_name)
        return self._files[file_name]

    def _read_index(self, index_path: Path) -> dict[str, str]:
        file_of = read_json_object(index_path).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
            raise UserError(f"{index_path} has no weight_map of names to file names")
        for file_name in sorted(set(file_of.values())):
            if Path(file_name).name != file_name:
                raise UserError(f"{index_path} names {file_name!r}: shards must lie beside the index")
            present = set(self._open(file_name).names())
            expected = {name for name, owner in file_of.items() if owner == file_name}
            if present != expected:
                raise UserError(
                    f"{self.directory / file_name} and {INDEX_NAME} disagree about {min(present ^ expected)!r}: "
                    "download both again"
                )
        return file_of

    def names(self) -> list[str]:
        """Every tensor name."""
        return list(self._file_of)

    def info(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype name and shape of a tensor, without reading it."""
        return self._open(self._file_of[name]).info(name)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of its file; bfloat16 as uint16 bit patterns."""
        return self._open(self._file_of[name]).read(name)

    def release(self, name: str) -> None:
        """Give back the memory that maps a tensor; see `SafetensorsFile.release`."""
        self._open(self._file_of[name]).release(name)


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
