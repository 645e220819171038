"""Between a model (or MindFormers-named arrays) and logical Hugging Face tensors, driven by the `ModelSpec`."""

import logging
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindrlhf.data.metadata import generation_config
from mindrlhf.errors import UserError
from mindrlhf.specs import ModelDims, ModelSpec, find_spec
from mindrlhf.weights.contradictions import OUTPUT_NAME, check_tied, warn_of_other_files
from mindrlhf.weights.hf import TensorDirectory
from mindrlhf.weights.infos import file_dtype
from mindrlhf.weights.tensors import STORAGE_DTYPES, TensorInfo, convert_dtype, dtype_name
from mindrlhf.weights.writer import write_model_directory

MAX_SHARD_BYTES = 5_000_000_000

# Numbers of multi-token prediction layers, in families that have some.
_DRAFT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

_logger = logging.getLogger(__name__)


def hf_shapes(spec: ModelSpec, dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor of a model, by name, in the order of the forward pass."""
    return {name: shape for rule in spec.rules(dims) for name, shape in zip(rule.hf_names, rule.shape(dims))}


@dataclass(frozen=True)
class IgnoredNames(Container[str]):
    """Names that a checkpoint may hold although the model does not need them.

    Attributes:
        names: whole names: the output of a tied model.
        prefixes: beginnings of names: multi-token prediction layers, which are numbered after the model's own.
    """

    names: frozenset[str]
    prefixes: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        return name in self.names or name.startswith(self.prefixes)


def ignored_names(dims: ModelDims) -> IgnoredNames:
    """Names that a checkpoint of these dimensions may hold although nothing reads them."""
    drafts = range(dims.num_layers, dims.num_layers + dims.num_draft_layers)
    of_drafts = (*(f"model.layers.{layer}." for layer in drafts), "mtp.") if drafts else ()
    return IgnoredNames(frozenset({OUTPUT_NAME}) if dims.tied else frozenset(), of_drafts)


def check_checkpoint(source: TensorDirectory, spec: ModelSpec, dims: ModelDims) -> None:
    """Compare a Hugging Face checkpoint with what the model needs; ignored tensors are counted in the log.

    Raises:
        UserError: a tensor is missing, unexpected or has the wrong shape, or a tied head is none.
    """
    source.check_coverage(hf_shapes(spec, dims), ignored_names(dims))
    if dims.tied:
        check_tied(source)
    warn_of_other_files(source)
    num_drafts = count_draft_tensors(source, dims)
    if num_drafts:
        _logger.warning(
            "%d tensors of %d multi-token prediction layers are ignored: not trained, not sampled from, not exported",
            num_drafts,
            dims.num_draft_layers,
        )


def count_draft_tensors(source: TensorDirectory, dims: ModelDims) -> int:
    """Count the tensors of a checkpoint that belong to multi-token prediction layers."""
    return sum(name.startswith(ignored_names(dims).prefixes) for name in source.names())


def random_hf_weights(hf_config: dict, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield random float32 tensors: normal(0, initializer_range) matrices, norms that multiply by one, biases zero.

    Linear attention begins as in transformers: decays of exp(A_log) from 0.01 to 16, taps of its convolution within
    1 / sqrt(their number). Each tensor depends on `seed` and its own name only.
    """
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    for name, shape in hf_shapes(spec, dims).items():
        generator = np.random.default_rng([seed, *name.encode()])
        if name.endswith("A_log"):
            yield name, np.log(generator.uniform(0.01, 16, shape)).astype(np.float32)
        elif name.endswith("conv1d.weight"):
            yield name, generator.uniform(-1, 1, shape).astype(np.float32) * np.float32(shape[-1] ** -0.5)
        elif name.endswith("dt_bias"):
            yield name, np.ones(shape, np.float32)
        elif name.endswith("bias"):
            yield name, np.zeros(shape, np.float32)
        elif len(shape) == 1:
            adds_one = dims.zero_centred_norms and not name.endswith("linear_attn.norm.weight")
            yield name, np.full(shape, 0.0 if adds_one else 1.0, np.float32)
        else:
            yield name, generator.standard_normal(shape, dtype=np.float32) * np.float32(dims.initializer_range)


def export_hf(
    tensors: Iterator[tuple[str, np.ndarray]],
    hf_config: dict,
    out_dir: str | os.PathLike,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_dir: str | os.PathLike | None = None,
) -> dict[str, str]:
    """Write a Hugging Face directory that transformers and vLLM load; it appears whole or not at all.

    Args:
        tensors: (name, array) of every tensor, in any order; bfloat16 as uint16 bit patterns. Read once, as a stream.
        hf_config: becomes config.json, with the dtype of the files.
        out_dir: must not exist yet, or be empty.
        dtype: `float32`, `float16` or `bfloat16` of the files.
        max_shard_bytes: start another file when the next tensor would exceed this.
        tokenizer_dir: copy tokenizer and generation files from here; a language model then ends its answers where
            `generation_config.json` says, at the end tokens of this tokenizer, as in training.

    Returns:
        Checksums; see `write_model_directory`.

    Raises:
        UserError: `out_dir` is in use, the dtype is unknown, or the disk refuses.
    """
    if dtype not in STORAGE_DTYPES:
        raise UserError(f"dtype={dtype!r}: use one of {', '.join(STORAGE_DTYPES)}")
    answers = tokenizer_dir is not None and not find_spec(hf_config).is_scorer
    generation = generation_config(tokenizer_dir) if answers else None
    files = {"max_shard_bytes": max_shard_bytes, "tokenizer_dir": tokenizer_dir, "generation": generation}
    return write_hf(tensors, {}, hf_config, out_dir, dtype, **files)


def write_hf(
    tensors: Iterator[tuple[str, np.ndarray]],
    stored: Mapping[str, str],
    hf_config: dict,
    out_dir: str | os.PathLike,
    dtype: str | None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **options: Any,
) -> dict[str, str]:
    """Write tensors as a Hugging Face directory, one after the other; see :func:`export_hf`.

    Args:
        stored: the dtype of each tensor by name, which its file gets where ``dtype`` is None.
        options: of :func:`mindrlhf.weights.writer.model_directory`.
    """
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    dtypes = {name: file_dtype(rule, dtype) or stored[name] for rule in spec.rules(dims) for name in rule.hf_names}
    infos = [TensorInfo(name, dtypes[name], shape) for name, shape in hf_shapes(spec, dims).items()]
    converted = ((name, convert_dtype(array, dtype_name(array), dtypes[name])) for name, array in tensors)
    config = with_dtype(hf_config, dtype or infos[0].dtype)
    options |= {"file_format": "pt", "max_shard_bytes": max_shard_bytes}
    return write_model_directory(converted, infos, config, out_dir, **options)


def common_dtype(source: TensorDirectory, names: tuple[str, ...]) -> str:
    """The dtype of tensors that are fused into one: float32 holds every value when they differ."""
    dtypes = {source.info(name).dtype for name in names}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def with_dtype(hf_config: dict, dtype: str) -> dict:
    """config.json that states the dtype of its files; transformers 4 and 5 and vLLM all read `torch_dtype`."""
    kept = {key: _without_dtype(value) for key, value in without_drafts(hf_config).items() if key != "dtype"}
    return {**kept, "torch_dtype": dtype}


def _without_dtype(value: object) -> object:
    """The config of a part, which has the dtype of the whole."""
    is_part = isinstance(value, dict)
    return {key: one for key, one in value.items() if key not in ("dtype", "torch_dtype")} if is_part else value


def without_drafts(hf_config: dict) -> dict:
    """config.json of files without multi-token prediction layers."""
    return {**hf_config, **{key: 0 for key in _DRAFT_KEYS if hf_config.get(key)}}
