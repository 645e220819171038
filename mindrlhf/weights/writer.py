"""Write a model directory as a stream: sharded safetensors, index, config.json, tokenizer files; whole or not at all.

The safetensors format is written here because its Python API wants every tensor of a file in memory at once.
"""

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.system.files import whole_directory
from mindrlhf.weights.direct_file import DirectFile, OrderedChecksum
from mindrlhf.weights.hf import FILE_CODES, INDEX_NAME, SINGLE_NAME, STORAGE_DTYPES

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
_ALIGNMENT_BYTES = 8
# A tensor, or the pieces that make it when stacked along the first axis.
Content = np.ndarray | Iterable[np.ndarray]


@dataclass(frozen=True)
class TensorPlan:
    """Dtype name and shape of one tensor to be written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return int(np.prod(self.shape, dtype=np.int64)) * STORAGE_DTYPES[self.dtype].itemsize


def write_model_directory(
    tensors: Iterable[tuple[str, Content]],
    plan: dict[str, TensorPlan],
    config: dict,
    out_dir: str | os.PathLike,
    *,
    file_format: str,
    max_shard_bytes: int,
    tokenizer_dir: str | os.PathLike | None = None,
) -> dict[str, str]:
    """Write `tensors`, which must be exactly those of `plan` in any order, below a temporary name, then rename.

    Args:
        tensors: (name, array), each in the storage dtype and shape of its plan; read once. Instead of an array, the
            pieces that make it when stacked along the first axis, so that it need never be whole in memory.
        plan: what will be written, in the order of the files.
        config: becomes config.json.
        out_dir: must not exist yet, or be empty.
        file_format: the `format` entry of the safetensors metadata.
        max_shard_bytes: start another file when the next tensor would exceed this.
        tokenizer_dir: copy tokenizer and generation files from here.

    Returns:
        By file name the checksums, XXH3-64 in hex, of the safetensors files whose tensors came in the order of `plan`.

    Raises:
        UserError: `out_dir` is in use or cannot be written.
    """
    options = {"file_format": file_format, "max_shard_bytes": max_shard_bytes, "tokenizer_dir": tokenizer_dir}
    with model_directory(plan, config, out_dir, **options) as files:
        for name, content in tensors:
            files.write(name, content)
    return files.checksums()


@contextlib.contextmanager
def model_directory(
    plan: dict[str, TensorPlan],
    config: dict,
    out_dir: str | os.PathLike,
    *,
    file_format: str,
    max_shard_bytes: int,
    tokenizer_dir: str | os.PathLike | None = None,
) -> Iterator["TensorFiles"]:
    """As `write_model_directory`, for several threads: yields files that take tensors in any order, from any thread.

    The directory appears when the block ends without an error.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} exists already: choose another output directory or remove it")
    unfinished = out_dir.parent / f".{out_dir.name}.partial-{os.getpid()}"
    try:
        with whole_directory(out_dir, temporary=unfinished) as directory:
            files = TensorFiles(directory, plan, file_format, max_shard_bytes)
            yield files
            files.finish()
            _write_json(directory / "config.json", config)
            if tokenizer_dir is not None:
                for name in TOKENIZER_FILES:
                    if (Path(tokenizer_dir) / name).is_file():
                        shutil.copyfile(Path(tokenizer_dir) / name, directory / name)
    except OSError as error:
        raise UserError(f"{out_dir} cannot be written: {error.strerror}") from error


class TensorFiles:
    """The safetensors files of a directory, and their index. Each is open only while a tensor is written to it."""

    def __init__(self, directory: Path, plan: dict[str, TensorPlan], file_format: str, max_shard_bytes: int):
        self._directory, self._plan = directory, plan
        self._size_bytes: dict[str, int] = {}
        self._checksums: dict[str, OrderedChecksum] = {}
        self._places: dict[str, tuple[str, int]] = {}
        shards = _split_into_shards(plan, max_shard_bytes)
        file_names = [SINGLE_NAME]
        if len(shards) > 1:
            file_names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
        for file_name, names in zip(file_names, shards):
            header, offsets = _header(names, plan, file_format)
            self._size_bytes[file_name] = len(header) + sum(plan[name].size_bytes for name in names)
            self._checksums[file_name] = OrderedChecksum()
            with self._open(file_name) as file:
                file.write(memoryview(header), 0, self._checksums[file_name].taker(0))
            self._places.update({name: (file_name, len(header) + offset) for name, offset in offsets.items()})
        self._file_of = {name: file_name for name, (file_name, _) in self._places.items()}

    def _open(self, file_name: str) -> DirectFile:
        return DirectFile(self._directory / file_name, self._size_bytes[file_name])

    def write(self, name: str, content: Content) -> None:
        """Write one planned tensor, once."""
        assert name in self._places, f"tensor {name!r} is not planned, or was written twice"
        (file_name, position), plan, num_rows = self._places.pop(name), self._plan[name], 0
        with self._open(file_name) as file:
            for block in [content] if isinstance(content, np.ndarray) else content:
                assert block.dtype == STORAGE_DTYPES[plan.dtype], f"tensor {name!r} comes as {block.dtype}"
                assert block.shape[1:] == tuple(plan.shape[1:]), f"tensor {name!r} comes with shape {block.shape}"
                num_rows += block.shape[0]
                data = memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8))
                file.write(data, position, self._checksums[file_name].taker(position))
                position += len(data)
        assert num_rows == plan.shape[0], f"tensor {name!r} comes with {num_rows} rows instead of {plan.shape[0]}"

    def finish(self) -> None:
        """Write the index of the files; every planned tensor must have been written."""
        left = next(iter(self._places), None)
        assert left is None, f"{len(self._places)} planned tensors were not given, {left!r} first"
        if len(self._size_bytes) > 1:
            total = sum(tensor.size_bytes for tensor in self._plan.values())
            _write_json(self._directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": self._file_of})

    def checksums(self) -> dict[str, str]:
        """Return by file name the checksums, XXH3-64 in hex, of the files that were written from first to last byte."""
        values = {name: self._checksums[name].value(size_bytes) for name, size_bytes in self._size_bytes.items()}
        return {name: value for name, value in values.items() if value is not None}


def _split_into_shards(plan: dict[str, TensorPlan], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size_bytes = 0
    for name, tensor in plan.items():
        if shards[-1] and size_bytes + tensor.size_bytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(name)
        size_bytes += tensor.size_bytes
    return shards


def _header(names: list[str], plan: dict[str, TensorPlan], file_format: str) -> tuple[bytes, dict[str, int]]:
    """The length prefix and JSON header of a file, padded so that data is aligned, and each tensor's data offset."""
    entries: dict[str, dict] = {"__metadata__": {"format": file_format}}
    offsets = {}
    offset = 0
    for name in names:
        end = offset + plan[name].size_bytes
        entries[name] = {
            "dtype": FILE_CODES[plan[name].dtype],
            "shape": list(plan[name].shape),
            "data_offsets": [offset, end],
        }
        offsets[name] = offset
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text, offsets


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
