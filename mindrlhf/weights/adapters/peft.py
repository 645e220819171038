"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, written and read.

PEFT's "checkpoint format" page: tensors are named `base_model.model.MODULE.lora_A.weight` and `...lora_B.weight`, and
modules trained in full, such as the projection of a scoring model, `base_model.model.MODULE.weight`. The
shape of A is [rank, in], that of B [out, rank]; float32 here.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.specs import ModelDims, ModelSpec, find_spec
from mindrlhf.specs.lora import LoraOptions, adapters, module_names, role_of
from mindrlhf.specs.scoring import SCORE_NAME
from mindrlhf.system.files import whole_directory, write_file
from mindrlhf.weights.adapters.config import CONFIG_NAME, PREFIX, read_options
from mindrlhf.weights.contradictions import warn_of_other_files
from mindrlhf.weights.convert import hf_shapes
from mindrlhf.weights.file_writer import TensorFileWriter
from mindrlhf.weights.hf import TensorDirectory
from mindrlhf.weights.open import is_sharded
from mindrlhf.weights.safetensors_file import SafetensorsFile, safetensors_layout
from mindrlhf.weights.sharded import ShardedDirectory
from mindrlhf.weights.tensors import TensorInfo

TENSORS_NAME = "adapter_model.safetensors"


def exported_adapter(model_dir: Path) -> Path:
    """Return where the adapters of an exported model go, beside it."""
    return model_dir.with_name(f"{model_dir.name}_adapter")


def adapter_shapes(spec: ModelSpec, dims: ModelDims, options: LoraOptions) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of an adapter by PEFT's name, in the order of the forward pass."""
    rules = [rule for adapter in adapters(spec, dims, options) for rule in (adapter.down, adapter.up)]
    shapes = {PREFIX + name: shape for rule in rules for name, shape in zip(rule.hf_names, rule.shape(dims))}
    if spec.is_scorer:
        shapes[PREFIX + SCORE_NAME] = hf_shapes(spec, dims)[SCORE_NAME]
    return shapes


def adapter_config(spec: ModelSpec, dims: ModelDims, options: LoraOptions, base_path: str) -> dict:
    """Return what PEFT reads from `adapter_config.json`.

    Modules are named by the end of their names, unless a module that has no adapter ends like one that has.
    """
    targeted = {name for one in adapters(spec, dims, options) for name in module_names(one.base.hf_names)}
    matrices = {name for rule in spec.rules(dims) if role_of(rule, dims) for name in module_names(rule.hf_names)}
    ends = {name.rpartition(".")[2] for name in targeted}
    if any(name.rpartition(".")[2] in ends for name in matrices - targeted):
        ends = targeted
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if spec.is_scorer else "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "use_rslora": options.rank_stabilised,
        "lora_dropout": 0.0,
        "target_modules": sorted(ends),
        "modules_to_save": [SCORE_NAME.removesuffix(".weight")] if spec.is_scorer else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def write_adapter(
    tensors: Iterable[tuple[str, np.ndarray]], shapes: Mapping[str, tuple[int, ...]], config: dict, out_dir: Path
) -> dict[str, str]:
    """Write a directory that PEFT and vLLM load; it appears whole or not at all.

    Args:
        tensors: float32, exactly those of `shapes`; read once, as a stream.
        shapes: see `adapter_shapes`.
        config: see `adapter_config`.
        out_dir: must not exist yet.

    Returns:
        Checksums, XXH3-64 in hex, by file name.

    Raises:
        UserError: the disk refuses.
    """
    infos = [TensorInfo(name, "float32", shape) for name, shape in shapes.items()]
    try:
        with whole_directory(out_dir) as directory:
            write_file(directory / CONFIG_NAME, json.dumps(config, indent=2) + "\n")
            writer = TensorFileWriter(directory / TENSORS_NAME, safetensors_layout(infos, {"format": "pt"}))
            try:
                for name, array in tensors:
                    writer.write(name, array)
                checksum = writer.finish()
            finally:
                writer.discard()
    except OSError as error:
        raise UserError(f"{out_dir} cannot be written: {error.strerror}") from error
    return {TENSORS_NAME: checksum} if checksum else {}


class AdapterDirectory(TensorDirectory):
    """A directory in PEFT's format; tensors are read lazily, under PEFT's names.

    Attributes:
        lora: rank, alpha and scaling; what is targeted shows in the names of the tensors.

    Raises:
        UserError: it is no such directory, is damaged, or computes something else than W + s B A.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        for name in (CONFIG_NAME, TENSORS_NAME):
            if not (self.directory / name).is_file():
                raise UserError(f"{self.directory} has no {name}: give the directory of an adapter in PEFT's format")
        self.lora = read_options(self.directory / CONFIG_NAME)
        self._file = SafetensorsFile(self.directory / TENSORS_NAME)
        warn_of_other_files(self, "adapter_model")

    def names(self) -> list[str]:
        return list(self._file.names())

    def info(self, name: str) -> TensorInfo:
        """Name, dtype and shape of a tensor, without reading it."""
        return self._file.info(name)

    def read(self, name: str) -> np.ndarray:
        """The tensor as it is stored; bfloat16 as uint16 bit patterns."""
        return self._file.read(name)


def open_adapter(directory: str | os.PathLike) -> AdapterDirectory | ShardedDirectory:
    """Open an adapter in PEFT's format, or the shards of one, which have the same names.

    Raises:
        UserError: it is neither, or is damaged.
    """
    if not is_sharded(directory):
        return AdapterDirectory(directory)
    shards = ShardedDirectory(directory)
    if shards.lora is None:
        raise UserError(f"{directory} holds a model, not an adapter: give one of a run with lora.rank")
    return shards


def check_adapter(
    directory: str | os.PathLike, hf_config: dict, options: LoraOptions
) -> AdapterDirectory | ShardedDirectory:
    """Open an adapter that is to go on in a model with adapters of ``options``.

    Raises:
        UserError: it is of another rank, scale or model.
    """
    source = open_adapter(directory)
    for key in ("rank", "alpha", "rank_stabilised"):
        found, wanted = getattr(source.lora, key), getattr(options, key)
        if found != wanted:
            raise UserError(
                f"the adapter in {source.directory} has {key}={found}, but 'lora.{key}' is {wanted}: set it to {found}"
            )
    spec = find_spec(hf_config)
    source.check_coverage(adapter_shapes(spec, spec.dims(hf_config), options))
    return source
