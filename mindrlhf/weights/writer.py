"""Write a model directory as a stream: sharded safetensors, index, config.json, tokenizer files; whole or not at all.

The safetensors format is written here because its Python API wants every tensor of a file in memory at once.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mindrlhf.durable import sync
from mindrlhf.errors import UserError
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
    tensors: Iterable[tuple[str, np.ndarray | Iterable[np.ndarray]]],
    plan: dict[str, TensorPlan],
    config: dict,
    out_dir: str | os.PathLike,
    *,
    file_format: str,
    max_shard_bytes: int,
    tokenizer_dir: str | os.PathLike | None = None,
) -> None:
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

    Raises:
        UserError: `out_dir` is in use or cannot be written.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} exists already: choose another output directory or remove it")
    temporary = out_dir.parent / f".{out_dir.name}.partial-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        _write_tensors(temporary, tensors, plan, file_format, max_shard_bytes)
        _write_json(temporary / "config.json", config)
        if tokenizer_dir is not None:
            for name in TOKENIZER_FILES:
                if (Path(tokenizer_dir) / name).is_file():
                    shutil.copyfile(Path(tokenizer_dir) / name, temporary / name)
        sync(temporary)
        os.replace(temporary, out_dir)
        sync(out_dir.parent)
    except OSError as error:
        raise UserError(f"{out_dir} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tensors(
    directory: Path,
    tensors: Iterable[tuple[str, np.ndarray | Iterable[np.ndarray]]],
    plan: dict[str, TensorPlan],
    file_format: str,
    max_shard_bytes: int,
) -> None:
    shards = _split_into_shards(plan, max_shard_bytes)
    file_names = [SINGLE_NAME]
    if len(shards) > 1:
        file_names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    places = {}
    for file_name, names in zip(file_names, shards):
        header, offsets = _header(names, plan, file_format)
        with open(directory / file_name, "wb") as file:
            file.write(header)
        places.update({name: (file_name, len(header) + offset) for name, offset in offsets.items()})
    for name, content in tensors:
        assert name in places, f"tensor {name!r} is not planned, or was written twice"
        file_name, position = places.pop(name)
        with open(directory / file_name, "r+b") as file:
            file.seek(position)
            _write_blocks(file, name, [content] if isinstance(content, np.ndarray) else content, plan[name])
    assert not places, f"{len(places)} planned tensors were not given, {next(iter(places))!r} first"
    for file_name in file_names:
        sync(directory / file_name)
    if len(shards) > 1:
        total = sum(tensor.size_bytes for tensor in plan.values())
        weight_map = {name: file_name for file_name, names in zip(file_names, shards) for name in names}
        _write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_blocks(file: BinaryIO, name: str, blocks: Iterable[np.ndarray], plan: TensorPlan) -> None:
    num_rows = 0
    for block in blocks:
        assert block.dtype == STORAGE_DTYPES[plan.dtype], f"tensor {name!r} comes as {block.dtype}"
        assert block.shape[1:] == tuple(plan.shape[1:]), f"tensor {name!r} comes with shape {block.shape}"
        num_rows += block.shape[0]
        file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    assert num_rows == plan.shape[0], f"tensor {name!r} comes with {num_rows} rows instead of {plan.shape[0]}"


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
    sync(path)
