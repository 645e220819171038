"""Write a model directory as a stream: safetensors, index, config.json, tokenizer files; whole or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.data.metadata import with_padding
from mindrlhf.data.tokenizer_config import GENERATION_NAME
from mindrlhf.errors import UserError
from mindrlhf.system.files import whole_directory
from mindrlhf.system.progress import counted
from mindrlhf.weights.file_writer import Content, TensorFileWriter
from mindrlhf.weights.hf import INDEX_NAME, SINGLE_NAME
from mindrlhf.weights.safetensors_file import safetensors_layout
from mindrlhf.weights.tensors import TensorInfo

# What a model's directory holds beside its config.json and its weights, by the patterns of their names.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    GENERATION_NAME,
    "LICENSE*",
    "NOTICE*",
)


def write_model_directory(
    tensors: Iterable[tuple[str, Content]],
    infos: Sequence[TensorInfo],
    config: dict,
    out_dir: str | os.PathLike,
    **options: Any,
) -> dict[str, str]:
    """Write `tensors`, which must be exactly those of `infos` in any order, as :func:`model_directory` does.

    Args:
        tensors: (name, content), see :meth:`TensorFileWriter.write`; read once.

    Returns:
        By file name the checksums, XXH3-64 in hex, of the safetensors files whose tensors came in the order of `infos`.

    Raises:
        UserError: `out_dir` is in use or cannot be written.
    """
    with model_directory(infos, config, out_dir, **options) as files:
        for name, content in counted(tensors, len(infos), "tensors"):
            files.write(name, content)
    return files.checksums


@contextlib.contextmanager
def model_directory(
    infos: Sequence[TensorInfo],
    config: dict,
    out_dir: str | os.PathLike,
    *,
    file_format: str,
    max_shard_bytes: int,
    tokenizer_dir: str | os.PathLike | None = None,
    generation: dict | None = None,
) -> Iterator["TensorFiles"]:
    """Yield files that take tensors in any order, from any thread; the directory appears when the block ends.

    Args:
        infos: what will be written, in the order of the files.
        config: becomes config.json, of a model that scores with the tokenizer's padding.
        out_dir: must not exist yet, or be empty.
        file_format: the `format` entry of the safetensors metadata.
        max_shard_bytes: start another file when the next tensor would exceed this.
        tokenizer_dir: copy tokenizer and generation files from here.
        generation: becomes generation_config.json in the place of what is copied.

    Raises:
        UserError: `out_dir` is in use or cannot be written.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UserError(f"{out_dir} exists already: choose another output directory or remove it")
    unfinished = out_dir.parent / f".{out_dir.name}.partial-{os.getpid()}"
    try:
        with whole_directory(out_dir, temporary=unfinished) as directory:
            files = TensorFiles(directory, infos, file_format, max_shard_bytes)
            yield files
            files.finish()
            _write_json(directory / "config.json", with_padding(config, tokenizer_dir) if tokenizer_dir else config)
            if tokenizer_dir is not None:
                for name in tokenizer_files(Path(tokenizer_dir)):
                    (directory / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(Path(tokenizer_dir) / name, directory / name)
            if generation is not None:
                _write_json(directory / GENERATION_NAME, generation)
    except OSError as error:
        raise UserError(f"{out_dir} cannot be written: {error.strerror}") from error


class TensorFiles:
    """The safetensors files of a directory, and their index.

    Attributes:
        checksums: by file name, XXH3-64 in hex, of the files that were written from first to last byte.
    """

    def __init__(self, directory: Path, infos: Sequence[TensorInfo], file_format: str, max_shard_bytes: int):
        self._directory, self._infos = directory, infos
        self._writers: list[TensorFileWriter] = []
        self._writer_of: dict[str, TensorFileWriter] = {}
        groups = _split_into_files(infos, max_shard_bytes)
        for index, group in enumerate(groups, start=1):
            name = SINGLE_NAME if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
            writer = TensorFileWriter(directory / name, safetensors_layout(group, {"format": file_format}))
            self._writers.append(writer)
            self._writer_of.update(dict.fromkeys((info.name for info in group), writer))
        self.checksums: dict[str, str] = {}

    def write(self, name: str, content: Content) -> None:
        self._writer_of[name].write(name, content)

    def finish(self) -> None:
        """Finish all files and write their index; every tensor must have been written."""
        for writer in self._writers:
            if found := writer.finish():
                self.checksums[writer.path.name] = found
        if len(self._writers) > 1:
            total = sum(info.size_bytes for info in self._infos)
            file_of = {name: writer.path.name for name, writer in self._writer_of.items()}
            _write_json(self._directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": file_of})


def tokenizer_files(directory: Path) -> list[Path]:
    """Return what a model's directory holds beside its config.json and its weights: tokenizer, templates, licences.

    The paths are relative to it.
    """
    found = {path for pattern in TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(directory) for path in found)


def _split_into_files(infos: Iterable[TensorInfo], max_shard_bytes: int) -> list[list[TensorInfo]]:
    groups: list[list[TensorInfo]] = [[]]
    size_bytes = 0
    for info in infos:
        if groups[-1] and size_bytes + info.size_bytes > max_shard_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(info)
        size_bytes += info.size_bytes
    return groups


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
