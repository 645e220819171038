"""Hugging Face model directories: config.json and safetensors files, read lazily."""

import os
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import numpy as np

from mindrlhf.errors import NotThere, UserError
from mindrlhf.hub.cache import no_directory
from mindrlhf.system.sizes import read_json_object
from mindrlhf.weights.safetensors_file import SafetensorsFile
from mindrlhf.weights.tensors import STORAGE_DTYPES, TensorInfo, convert_dtype

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
GGUF_ENDING = ".gguf"
# In a directory with this file the tensors lie in shards, as `mindrlhf weights shard` wrote them.
SHARDED_NAME = "sharded.json"


def read_hf_config(model_dir: str | os.PathLike) -> dict:
    """Read `config.json` of a Hugging Face directory.

    Raises:
        UserError: the directory or file is missing, or the file is not a JSON object.
    """
    path = Path(model_dir) / "config.json"
    if not Path(model_dir).is_dir():
        name = str(model_dir)
        if name.endswith(GGUF_ENDING):
            raise UserError(f"{name} is no directory: make one of it with mindrlhf weights convert {name} --output DIR")
        raise UserError(no_directory(name))
    if not path.is_file():
        raise UserError(f"{model_dir} has no config.json: give a Hugging Face model directory")
    return read_json_object(path)


class TensorDirectory(ABC):
    """Logical Hugging Face tensors of a model directory, whatever its files hold."""

    directory: Path

    @abstractmethod
    def names(self) -> list[str]:
        """Every tensor name."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Name, dtype and shape of a tensor, without reading it."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor, not to be written to; bfloat16 as uint16 bit patterns."""

    def unread_files(self) -> list[str]:
        """Names of files beside its own that look like a model's weights, too, and are not read."""
        return []

    def read_float32(self, name: str) -> np.ndarray:
        return convert_dtype(self.read(name), self.info(name).dtype, "float32")

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
            found = self.info(name).shape
            if found != tuple(shape):
                raise UserError(
                    f"{self.directory}: tensor {name!r} has shape {list(found)}, but config.json implies {list(shape)}"
                )


class SafetensorsDirectory(TensorDirectory):
    """The safetensors of a model directory, single or sharded with an index; tensors are read lazily.

    Raises:
        UserError: directory missing, no safetensors in it, a shard missing, an index that does not fit the shards, or
            two models in it.
    """

    def __init__(self, model_dir: str | os.PathLike, dtypes: Iterable[str] = STORAGE_DTYPES):
        self.directory, self._dtypes = Path(model_dir), tuple(dtypes)
        if not self.directory.is_dir():
            raise UserError(no_directory(str(model_dir)))
        _check_one_model(self.directory)
        self._files: dict[str, SafetensorsFile] = {}
        index_path = self.directory / INDEX_NAME
        if index_path.is_file():
            self._file_of = self._read_index(index_path)
        elif (self.directory / SINGLE_NAME).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE_NAME).names(), SINGLE_NAME)
        else:
            raise NotThere(f"{self.directory} has neither {SINGLE_NAME} nor {INDEX_NAME}: only safetensors are read")

    def _open(self, file_name: str) -> SafetensorsFile:
        if file_name not in self._files:
            self._files[file_name] = SafetensorsFile(self.directory / file_name, self._dtypes)
        return self._files[file_name]

    def _read_index(self, index_path: Path) -> dict[str, str]:
        file_of = read_json_object(index_path).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
            raise UserError(f"{index_path} has no weight_map of names to file names")
        _check_index(self.directory, file_of)
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

    def unread_files(self) -> list[str]:
        """Names of files that are called like a model's weights and are none of its own."""
        found = {path.name for path in self.directory.glob("model*.safetensors")}
        return sorted(found - set(self._file_of.values()))

    def names(self) -> list[str]:
        return list(self._file_of)

    def info(self, name: str) -> TensorInfo:
        """Name, dtype and shape of a tensor, without reading it."""
        return self._open(self._file_of[name]).info(name)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of its file; bfloat16 as uint16 bit patterns."""
        return self._open(self._file_of[name]).read(name)

    def release(self, name: str) -> None:
        self._open(self._file_of[name]).release(name)


def _check_one_model(directory: Path) -> None:
    """Check that a directory of safetensors holds one model, before any of it is read.

    Raises:
        UserError: it has weights in one file and, by its index, in others; or an adapter beside a whole model.
    """
    has_model = [name for name in (SINGLE_NAME, INDEX_NAME) if (directory / name).is_file()]
    if has_model and (directory / SHARDED_NAME).is_file():
        raise UserError(f"{directory} holds two models, {has_model[0]} and the shards of {SHARDED_NAME}: remove one")
    if has_model and (directory / ADAPTER_CONFIG_NAME).is_file() and any(directory.glob("adapter_model.*")):
        raise UserError(
            f"{directory} holds a whole model and an adapter ({ADAPTER_CONFIG_NAME}), which transformers adds to it: "
            "move the adapter elsewhere, or merge it with 'mindrlhf weights merge-adapter'"
        )


def _check_index(directory: Path, file_of: Mapping[str, str]) -> None:
    """Check that no file of weights lies beside those of an index.

    Raises:
        UserError: ``model.safetensors`` does.
    """
    if SINGLE_NAME not in file_of.values() and (directory / SINGLE_NAME).is_file():
        raise UserError(
            f"{directory} holds two models: {SINGLE_NAME}, and {len(set(file_of.values()))} files of {INDEX_NAME}; "
            "transformers reads the first: remove what is not meant"
        )


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
