"""Whole arrays, parameters and optimiser state, to be sharded: from a Hugging Face directory or from shards."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindrlhf.algorithms.optimizers import GLOBAL_STEP_NAME, Optimizer, optimizer_of
from mindrlhf.errors import UserError
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.specs import ModelDims, ModelSpec, ParameterRule, find_spec, scorer_config
from mindrlhf.specs.fuse import fuse_blocks
from mindrlhf.specs.scoring import SCORE_NAME
from mindrlhf.weights.array_file import ArrayFile
from mindrlhf.weights.convert import (
    check_checkpoint,
    common_dtype,
    random_hf_weights,
    with_dtype,
    without_drafts,
)
from mindrlhf.weights.file_writer import checksum
from mindrlhf.weights.hf import SHARDED_NAME, SafetensorsDirectory, read_hf_config, read_json_object
from mindrlhf.weights.infos import file_dtype
from mindrlhf.weights.open import is_sharded
from mindrlhf.weights.sharded import ShardedDirectory
from mindrlhf.weights.tensors import STORAGE_DTYPES, convert_dtype


class ArraySource(Protocol):
    """Source of whole arrays.

    Attributes:
        directory: config.json and tokenizer files are copied from here.
        spec, dims: the model.
        hf_config: its config.json, as the sharded directory will have it.
        dtypes: dtype name of every array, parameters first.
        tensors: dtype name of every Hugging Face tensor.
    """

    directory: Path
    spec: ModelSpec
    dims: ModelDims
    hf_config: dict
    dtypes: dict[str, str]
    tensors: dict[str, str]

    def identity(self) -> Any:
        """Identity of the source, JSON-able; it changes when the source does."""

    def read(self, name: str) -> tuple[np.ndarray, dict[str, str]]:
        """A whole array in MindFormers' layout, and the checksums of the Hugging Face tensors it was made of."""

    def read_shard(self, layout: ParameterLayout, rank: int) -> np.ndarray:
        """Return the shard of ``layout.name`` on ``rank``, in the dtype of the source."""

    def release(self, name: str) -> None:
        """Give back the memory that maps what an array was read from."""


def open_source(directory: str | os.PathLike, *, is_partial: bool = False) -> ArraySource:
    """Open a Hugging Face directory, or one of shards, whose optimiser state is in it.

    Args:
        is_partial: shards of ranks that hold others than are read may be elsewhere.

    Raises:
        UserError: see :class:`HuggingFaceSource` and :class:`mindrlhf.weights.sharded.ShardedDirectory`.
    """
    if is_sharded(directory):
        return ShardedSource(directory, is_partial=is_partial)
    return HuggingFaceSource(directory)


class HuggingFaceSource:
    """The parameters of a Hugging Face directory, fused as MindFormers wants them, and optimiser state.

    Raises:
        UserError: the directory does not fit its config.json, or the optimiser state does not fit the model.
    """

    def __init__(self, hf_dir: str | os.PathLike, dtype: str | None = None, optimizer_file: str | os.PathLike = ""):
        self.directory = Path(hf_dir)
        hf_config = read_hf_config(hf_dir)
        self.spec = find_spec(hf_config)
        self.dims = self.spec.dims(hf_config)
        self.hf_config = with_dtype(hf_config, dtype) if dtype else without_drafts(hf_config)
        self._files = SafetensorsDirectory(hf_dir)
        check_checkpoint(self._files, self.spec, self.dims)
        self._rules = {rule.mf_name: rule for rule in self.spec.rules(self.dims)}
        self.tensors = {
            name: file_dtype(rule, dtype) or self._files.info(name).dtype
            for rule in self._rules.values()
            for name in rule.hf_names
        }
        self.dtypes = {
            name: file_dtype(rule, dtype) or common_dtype(self._files, rule.hf_names)
            for name, rule in self._rules.items()
        }
        self._state = ArrayFile(Path(optimizer_file)) if optimizer_file else {}
        self._state_path = Path(optimizer_file)
        if optimizer_file:
            self._check_state()

    def _check_state(self) -> None:
        states = states_of(self._rules.values(), self.dims, optimizer_of(self._state))
        names = [f"{kind}.{name}" for name, kinds in states.items() for kind in kinds]
        unknown = sorted(self._state.keys() - {*names, GLOBAL_STEP_NAME})
        if unknown or not self._state:
            raise UserError(
                f"{self._state_path} has {unknown[0] if unknown else 'nothing'}, which is no optimiser state of this "
                "model: give the optimizer.safetensors of the model's own checkpoint"
            )
        for name in (*names, GLOBAL_STEP_NAME):
            if name not in self._state:
                raise UserError(f"{self._state_path} lacks {name}: it is of another model, or damaged")
            expected = (1,) if name == GLOBAL_STEP_NAME else self._rules[name.partition(".")[2]].mf_shape(self.dims)
            if self._state.shape(name) != expected:
                raise UserError(
                    f"{self._state_path} has {name} of {list(self._state.shape(name))}, not {list(expected)}: it is of "
                    "another model"
                )
            self.dtypes[name] = "int32" if name == GLOBAL_STEP_NAME else "float32"

    def identity(self) -> Any:
        paths = sorted(self.directory.glob("*.safetensors"))
        paths += [self._state_path] if self._state else []
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]

    def read(self, name: str) -> tuple[np.ndarray, dict[str, str]]:
        if name in self._state:
            return self._state[name], {}
        rule = self._rules[name]
        checksums: dict[str, str] = {}

        def read_tensor(hf_name: str) -> np.ndarray:
            stored = self.tensors[hf_name]
            original = convert_dtype(self._files.read(hf_name), self._files.info(hf_name).dtype, stored)
            checksums[hf_name] = checksum(original)
            return convert_dtype(original, stored, self.dtypes[name])

        blocks = fuse_blocks(rule, self.dims, read_tensor)
        if rule.num_experts == 1:
            return np.ascontiguousarray(next(blocks)), checksums
        whole = np.empty(rule.mf_shape(self.dims), STORAGE_DTYPES[self.dtypes[name]])
        for expert, block in zip(np.split(whole, rule.num_experts), blocks):
            expert[...] = block
        return whole, checksums

    def read_shard(self, layout: ParameterLayout, rank: int) -> np.ndarray:
        whole, _ = self.read(layout.name)
        return np.ascontiguousarray(whole[layout.shard_of(rank)])

    def release(self, name: str) -> None:
        for hf_name in self._rules[name].hf_names if name in self._rules else ():
            self._files.release(hf_name)


def states_of(rules: Iterable[ParameterRule], dims: ModelDims, optimizer: Optimizer) -> dict[str, tuple[str, ...]]:
    """Return the names of what an optimiser keeps for each trained parameter, by the name of that."""
    return {rule.mf_name: optimizer.state_of(rule.matrices(dims) is not None) for rule in rules if rule.trained}


def open_scorer_source(directory: str | os.PathLike) -> ArraySource:
    """Open a scoring model (reward model, critic), or a language model as one: then the score's weight is 0.

    Raises:
        UserError: see :func:`open_source`.
    """
    source = open_source(directory)
    return source if source.spec.is_scorer else ScorerSource(source)


class ScorerSource:
    """The parameters of a language model as those of a scoring model; see `ArraySource`."""

    def __init__(self, source: ArraySource):
        self._source = source
        self.directory = source.directory
        self.hf_config = scorer_config(source.hf_config)
        self.spec = find_spec(self.hf_config)
        self.dims = self.spec.dims(self.hf_config)
        self._rules = {rule.mf_name: rule for rule in self.spec.rules(self.dims)}
        dtypes = {name: dtype for name, dtype in source.dtypes.items() if name in self._rules}
        self.dtypes = {**dtypes, SCORE_NAME: "float32"}
        names = [name for rule in self._rules.values() for name in rule.hf_names]
        self.tensors = {name: source.tensors.get(name, "float32") for name in names}

    def identity(self) -> Any:
        return ["scorer", self._source.identity()]

    def read(self, name: str) -> tuple[np.ndarray, dict[str, str]]:
        if name != SCORE_NAME:
            return self._source.read(name)
        zeros = np.zeros(self._rules[name].mf_shape(self.dims), np.float32)
        return zeros, {name: checksum(zeros)}

    def read_shard(self, layout: ParameterLayout, rank: int) -> np.ndarray:
        if layout.name != SCORE_NAME:
            return self._source.read_shard(layout, rank)
        return np.ascontiguousarray(self.read(SCORE_NAME)[0][layout.shard_of(rank)])

    def release(self, name: str) -> None:
        if name != SCORE_NAME:
            self._source.release(name)


class RandomSource:
    """Random parameters of a model of which only config.json is needed; see `ArraySource`. Small models only.

    Args:
        directory: of config.json.
        seed: see :func:`mindrlhf.weights.convert.random_hf_weights`.
        as_scorer: of the scoring form of the model.
    """

    def __init__(self, directory: str | os.PathLike, seed: int, *, as_scorer: bool = False):
        self.directory = Path(directory)
        hf_config = read_hf_config(directory)
        self.hf_config = scorer_config(hf_config) if as_scorer else hf_config
        self.spec = find_spec(self.hf_config)
        self.dims = self.spec.dims(self.hf_config)
        self._seed = seed
        self._tensors = dict(random_hf_weights(self.hf_config, seed))
        self._rules = {rule.mf_name: rule for rule in self.spec.rules(self.dims)}
        self.tensors = dict.fromkeys(self._tensors, "float32")
        self.dtypes = dict.fromkeys(self._rules, "float32")

    def identity(self) -> Any:
        return [self._seed, self.hf_config]

    def read(self, name: str) -> tuple[np.ndarray, dict[str, str]]:
        rule = self._rules[name]
        whole = np.concatenate(list(fuse_blocks(rule, self.dims, self._tensors.__getitem__)))
        return whole, {hf_name: checksum(self._tensors[hf_name]) for hf_name in rule.hf_names}

    def read_shard(self, layout: ParameterLayout, rank: int) -> np.ndarray:
        whole, _ = self.read(layout.name)
        return np.ascontiguousarray(whole[layout.shard_of(rank)])

    def release(self, name: str) -> None:
        """Keep the arrays: they are in memory."""


class ShardedSource:
    """The arrays of a sharded directory, put together from its shards; see `ArraySource`."""

    def __init__(self, directory: str | os.PathLike, *, is_partial: bool = False):
        self._shards = ShardedDirectory(directory, is_partial=is_partial)
        self.directory = Path(directory)
        self.spec, self.dims, self.hf_config = self._shards.spec, self._shards.dims, self._shards.hf_config
        self.dtypes = {name: array.dtype for name, array in self._shards.manifest.arrays.items()}
        self.tensors = {name: dtype for name, (dtype, _) in self._shards.manifest.tensors.items()}
        self._rules = {rule.mf_name: rule for rule in self._shards.rules()}

    def identity(self) -> Any:
        return [self._shards.manifest.plan, read_json_object(self.directory / SHARDED_NAME)["arrays"]]

    def read(self, name: str) -> tuple[np.ndarray, dict[str, str]]:
        whole = self._shards.read_array(name)
        rule = self._rules.get(name)
        names = rule.hf_names if rule else ()
        return whole, {hf_name: self._shards.manifest.tensors[hf_name][1] for hf_name in names}

    def read_shard(self, layout: ParameterLayout, rank: int) -> np.ndarray:
        if self._shards.manifest.arrays[layout.name].layout == layout:
            return self._shards.read_shard(rank, layout.name)
        whole, _ = self.read(layout.name)
        return np.ascontiguousarray(whole[layout.shard_of(rank)])

    def release(self, name: str) -> None:
        """Do nothing: the shards were released when the array was put together."""
