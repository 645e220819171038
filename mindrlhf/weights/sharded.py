"""A directory of shards, one per rank, that together are a model: what lies where, and reading it back.

::

    sharded.json                     every array: dtype, shape, how it is sharded; checksum of every Hugging Face tensor
    config.json, tokenizer files     as in the Hugging Face directory
    adapter_config.json              in PEFT's format, where the arrays are the factors of an adapter of that model
    strategy/                        MindSpore's strategy files of the layout
    rank_0/checkpoint_0.safetensors  the shards of rank 0, by MindFormers name (or checkpoint_0.ckpt)
    rank_0/manifest.json             checksum of each shard

Arrays are parameters and, where there is any, optimiser state (`STATE.NAME`, sharded as parameter NAME, and
`global_step`, whole on each rank; see :mod:`mindrlhf.algorithms.optimizers`).
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.layout.parameter import MAX_RANKS, ParameterLayout, check_layout
from mindrlhf.specs import ParameterRule, find_spec
from mindrlhf.specs.fuse import split
from mindrlhf.specs.lora import AdaptedRules, LoraOptions
from mindrlhf.system.sizes import read_json_object
from mindrlhf.weights.adapters.config import CONFIG_NAME, read_options, saved_rules
from mindrlhf.weights.file_writer import checksum
from mindrlhf.weights.hf import SHARDED_NAME, TensorDirectory, read_hf_config
from mindrlhf.weights.shard_files import FILE_FORMATS, open_shard
from mindrlhf.weights.tensors import SHARD_DTYPES, STORAGE_DTYPES, TensorInfo, convert_dtype

FORMAT_VERSION = 1
PROGRESS_NAME = "progress.json"  # stands for sharded.json while the directory is being written
RANK_MANIFEST_NAME = "manifest.json"
STRATEGY_NAME = "strategy"


def rank_file(directory: Path, rank: int, file_format: str) -> Path:
    """Path of the shards of a rank, where `transform_checkpoints` looks for them."""
    return directory / f"rank_{rank}" / f"checkpoint_{rank}.{file_format}"


@dataclasses.dataclass(frozen=True)
class ShardedArray:
    """One array of a sharded directory.

    Attributes:
        dtype: name of its dtype.
        layout: its name, whole shape and shards.
        checksum: of the whole array; empty for a parameter, whose Hugging Face tensors have their own, and where it is
            not known, as in the checkpoint of a run, whose arrays were never whole.
    """

    dtype: str
    layout: ParameterLayout
    checksum: str = ""

    @property
    def shard_info(self) -> TensorInfo:
        """Name, dtype and shape of each shard."""
        return TensorInfo(self.layout.name, self.dtype, self.layout.shard_shape)

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.layout.name, self.dtype, self.layout.shape)


@dataclasses.dataclass(frozen=True)
class ShardedManifest:
    """The content of sharded.json.

    Attributes:
        plan: identifies source, layouts, dtypes and format of the command that wrote the directory.
        parallel: the layout in short form, or where the strategy came from.
        file_format: `safetensors` or `ckpt`.
        num_ranks: ranks that have a directory.
        arrays: by MindFormers name, in the order of the forward pass.
        tensors: dtype name and checksum of each Hugging Face tensor; the latter empty where it is not known.
    """

    plan: str
    parallel: str
    file_format: str
    num_ranks: int
    arrays: dict[str, ShardedArray]
    tensors: dict[str, tuple[str, str]]

    def infos_of_rank(self, rank: int) -> dict[str, TensorInfo]:
        """Arrays in the file of a rank, by name."""
        return {
            name: array.shard_info
            for name, array in self.arrays.items()
            if rank // array.layout.stage_size in array.layout.stages
        }

    def to_json(self) -> dict[str, Any]:
        arrays = {}
        for name, array in self.arrays.items():
            layout = dataclasses.asdict(array.layout)
            del layout["name"]
            arrays[name] = {"dtype": array.dtype, "checksum": array.checksum, **layout}
        return {
            "format_version": FORMAT_VERSION,
            "plan": self.plan,
            "parallel": self.parallel,
            "file_format": self.file_format,
            "num_ranks": self.num_ranks,
            "arrays": arrays,
            "tensors": {name: list(entry) for name, entry in self.tensors.items()},
        }

    @classmethod
    def read(cls, path: Path) -> "ShardedManifest":
        """Read sharded.json.

        Raises:
            UserError: it is missing, damaged or of another release.
        """
        value = read_json_object(path)
        if value.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{path} has format version {value.get('format_version')!r}, this release reads {FORMAT_VERSION}: "
                "shard again"
            )
        try:
            arrays = {name: _array(name, entry) for name, entry in value["arrays"].items()}
            tensors = {name: (str(dtype), str(found)) for name, (dtype, found) in value["tensors"].items()}
            manifest = cls(value["plan"], value["parallel"], value["file_format"], value["num_ranks"], arrays, tensors)
            if manifest.file_format not in FILE_FORMATS:
                raise ValueError(f"unknown file format {manifest.file_format!r}")
            if type(manifest.num_ranks) is not int or not 1 <= manifest.num_ranks <= MAX_RANKS:
                raise ValueError(f"num_ranks is {manifest.num_ranks!r}")
            if strange := [name for name, (dtype, _) in tensors.items() if dtype not in STORAGE_DTYPES]:
                raise ValueError(f"{strange[0]!r} has an unknown dtype")
            last = max((max(array.layout.ranks) for array in arrays.values()), default=0)
            if last >= manifest.num_ranks:
                raise ValueError(f"rank {last} holds shards, of {manifest.num_ranks} ranks")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            raise UserError(f"{path} is damaged ({error}): copy it again, or shard again") from error
        return manifest


def _array(name: str, entry: Mapping[str, Any]) -> ShardedArray:
    tensor_map = tuple(tuple(axes) if isinstance(axes, list) else axes for axes in entry["tensor_map"])
    layout = ParameterLayout(
        name,
        tuple(entry["shape"]),
        tuple(entry["stages"]),
        tuple(entry["device_matrix"]),
        tensor_map,
        entry["optimizer_shard_size"],
    )
    check_layout(layout)
    if entry["dtype"] not in SHARD_DTYPES or not isinstance(entry["checksum"], str):
        raise ValueError(f"{name} has an unknown dtype or no checksum")
    return ShardedArray(entry["dtype"], layout, entry["checksum"])


def _lora(directory: Path) -> LoraOptions | None:
    path = directory / CONFIG_NAME
    return read_options(path) if path.is_file() else None


class ShardedDirectory(TensorDirectory):
    """The logical tensors of a sharded directory; each array is put together from its shards when it is read.

    Every shard that is read is compared with its checksum.

    Args:
        is_partial: ranks may have no directory here, as long as nothing of theirs is read.

    Attributes:
        lora: of a directory that holds an adapter, and in place of a model its factors; else None.

    Raises:
        UserError: the directory was not finished, a rank's directory or file is missing or truncated, or a manifest
            is damaged.
    """

    def __init__(self, directory: str | os.PathLike, *, is_partial: bool = False):
        self.directory = Path(directory)
        if not (self.directory / SHARDED_NAME).is_file():
            raise UserError(
                f"{self.directory} has no {SHARDED_NAME}: give a directory made by `mindrlhf weights shard`, and run "
                "that command again if it was interrupted"
            )
        self.manifest = ShardedManifest.read(self.directory / SHARDED_NAME)
        self.hf_config = read_hf_config(self.directory)
        self.spec = find_spec(self.hf_config)
        self.dims = self.spec.dims(self.hf_config)
        self.lora = _lora(self.directory)
        self._rules = self.spec.rules(self.dims) if self.lora is None else self._adapter_rules()
        self._rule_of_parameter = {rule.mf_name: rule for rule in self._rules}
        self._rule_of = {name: rule for rule in self._rules for name in rule.hf_names}
        self._shapes = {
            name: shape for rule in self._rules for name, shape in zip(rule.hf_names, rule.shape(self.dims))
        }
        for rule in self._rules:
            self._check_rule(rule)
        self._files, self._shards = {}, {}
        for rank in range(self.manifest.num_ranks):
            if not is_partial or rank_file(self.directory, rank, self.manifest.file_format).parent.exists():
                self._open_rank(rank)
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})

    def _adapter_rules(self) -> list[ParameterRule]:
        known = saved_rules(AdaptedRules(self.spec, self.dims, self.lora))
        return [rule for rule in known if rule.mf_name in self.manifest.arrays]

    def _check_rule(self, rule) -> None:
        array = self.manifest.arrays.get(rule.mf_name)
        if array is None or array.layout.shape != rule.mf_shape(self.dims):
            found = "nothing" if array is None else list(array.layout.shape)
            raise UserError(
                f"{self.directory} holds {found} of {rule.mf_name}, but its config.json implies "
                f"{list(rule.mf_shape(self.dims))}: it is of another model; shard again"
            )
        if missing := [name for name in rule.hf_names if name not in self.manifest.tensors]:
            raise UserError(f"{self.directory / SHARDED_NAME} is damaged: it lacks {missing[0]!r}; shard again")

    def _open_rank(self, rank: int) -> None:
        path = rank_file(self.directory, rank, self.manifest.file_format)
        again = f"copy it again, or remove {path.parent} and run the same `mindrlhf weights shard` again"
        for needed in (path.parent, path.parent / RANK_MANIFEST_NAME, path):
            if needed.is_symlink():
                raise UserError(f"{needed} is a symbolic link, which may lead anywhere: copy what it leads to")
            if not needed.exists():
                raise UserError(f"{needed} is missing, of {self.manifest.num_ranks} ranks: {again}")
        manifest = read_json_object(path.parent / RANK_MANIFEST_NAME)
        shards = manifest.get("arrays")
        if manifest.get("plan") != self.manifest.plan or not isinstance(shards, dict):
            raise UserError(f"{path.parent} is of another run of `mindrlhf weights shard`: {again}")
        if strange := [name for name, entry in shards.items() if not _is_shard_entry(entry)]:
            raise UserError(f"{path.parent / RANK_MANIFEST_NAME} is damaged at {strange[0]!r}: {again}")
        size_bytes, expected = path.stat().st_size, manifest.get("size_bytes")
        if size_bytes != expected:
            state = "truncated" if isinstance(expected, int) and size_bytes < expected else "damaged"
            raise UserError(f"{path} is {state}: it has {size_bytes} bytes, not {expected}; {again}")
        file = open_shard(path, self.manifest.file_format)
        infos = self.manifest.infos_of_rank(rank)
        if set(file.names()) != infos.keys() or shards.keys() != infos.keys():
            raise UserError(f"{path} does not hold the arrays of rank {rank}: {again}")
        for name, info in infos.items():
            found = file.info(name)
            if found != info:
                raise UserError(
                    f"{path} holds {name} as {found.dtype} {found.shape}, not {info.dtype} {info.shape}: {again}"
                )
        self._files[rank], self._shards[rank] = file, shards

    def names(self) -> list[str]:
        """Every Hugging Face name, in the order of the forward pass."""
        return list(self._rule_of)

    def info(self, name: str) -> TensorInfo:
        """Name, dtype and shape of a Hugging Face tensor."""
        return TensorInfo(name, self.manifest.tensors[name][0], self._shapes[name])

    def read(self, name: str) -> np.ndarray:
        """A Hugging Face tensor. Those that share a parameter are best read one after the other."""
        rule = self._rule_of[name]
        if self._last[0] != rule.mf_name:
            self._last = (rule.mf_name, self.read_tensors(rule))
        return self._last[1][name]

    def read_tensors(self, rule) -> dict[str, np.ndarray]:
        """The Hugging Face tensors of one parameter, by name, in their own dtypes.

        Raises:
            UserError: a shard is damaged, or the shards do not make the tensors of the original.
        """
        return self.split(rule, self._assemble(rule.mf_name))

    def split(self, rule, whole: np.ndarray) -> dict[str, np.ndarray]:
        """The Hugging Face tensors in the whole array of a parameter, compared with the checksums of the original."""
        dtype = self.manifest.arrays[rule.mf_name].dtype
        tensors = {}
        for name, part in zip(rule.hf_names, split(rule, self.dims, whole)):
            tensors[name] = np.ascontiguousarray(convert_dtype(part, dtype, self.manifest.tensors[name][0]))
            self._compare(name, tensors[name], self.manifest.tensors[name][1])
        return tensors

    def read_array(self, name: str) -> np.ndarray:
        """The whole array of a parameter or of optimiser state; checked as `read_tensors` does."""
        whole = self._assemble(name)
        self.check_array(name, whole)
        return whole

    def check_array(self, name: str, whole: np.ndarray) -> None:
        """Compare an array that was put together with the original, by the checksum of its tensors or its own.

        Raises:
            UserError: they differ.
        """
        if name in self._rule_of_parameter:
            self.split(self._rule_of_parameter[name], whole)
        else:
            self._compare(name, whole, self.manifest.arrays[name].checksum)

    def _assemble(self, name: str) -> np.ndarray:
        array = self.manifest.arrays[name]
        whole = np.empty(array.layout.shape, array.info.numpy_dtype)
        for rank in array.layout.writers():
            whole[array.layout.shard_of(rank)] = self.read_shard(rank, name)
            self.release(rank, name)
        return whole

    def _compare(self, name: str, array: np.ndarray, expected: str) -> None:
        # What a run has saved was never whole: there are only the checksums of its shards.
        if expected and (found := checksum(array)) != expected:
            raise UserError(
                f"{self.directory}: the shards of {name} do not make the original (checksum {found}, not {expected}): "
                "shard again"
            )

    def read_shard(self, rank: int, name: str) -> np.ndarray:
        """Return a rank's shard of an array; for safetensors a view of the mapped file.

        Raises:
            UserError: it differs from its checksum, or the rank's directory is elsewhere.
        """
        if rank not in self._files:
            missing = rank_file(self.directory, rank, self.manifest.file_format).parent
            raise UserError(f"{missing} is missing, and {name} is read from it: copy it from the node that holds it")
        file = self._files[rank]
        data = file.read(name)
        found, expected = checksum(data), self._shards[rank][name]["checksum"]
        if found != expected:
            raise UserError(
                f"{file.path} is damaged at {name} (checksum {found}, not {expected}): copy it again, or remove "
                f"{file.path.parent} and run the same `mindrlhf weights shard` again"
            )
        return data

    def release(self, rank: int, name: str) -> None:
        self._files[rank].release(name)

    def shard_entry(self, rank: int, name: str) -> dict[str, Any]:
        """Entry of a shard in its rank's manifest: offset, shape and checksum."""
        return self._shards[rank][name]

    def rules(self) -> Iterator:
        """The rule of every parameter, in the order of the forward pass."""
        yield from self._rules

    def state_names(self) -> list[str]:
        return [name for name in self.manifest.arrays if name not in self._rule_of_parameter]


def _is_shard_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("checksum"), str)
