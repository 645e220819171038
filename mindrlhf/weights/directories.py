"""Model directories in MindFormers' names and layouts: made of those of Hugging Face, made to such, and described."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindrlhf.specs import ModelDims, ModelSpec, find_spec
from mindrlhf.specs.fuse import fuse_blocks, split_parts
from mindrlhf.weights.convert import (
    MAX_SHARD_BYTES,
    check_checkpoint,
    common_dtype,
    count_draft_tensors,
    hf_shapes,
    ignored_names,
    with_dtype,
    without_drafts,
    write_hf,
)
from mindrlhf.weights.hf import SafetensorsDirectory, TensorDirectory, read_hf_config
from mindrlhf.weights.infos import file_dtype
from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.tensors import TensorInfo, convert_dtype
from mindrlhf.weights.writer import write_model_directory

MINDFORMERS_FORMAT = "mindformers"


def import_directory(hf_dir: str | os.PathLike, out_dir: str | os.PathLike, dtype: str | None = None) -> None:
    """Convert a Hugging Face directory to MindFormers names and layouts, bit-exact unless `dtype` is given.

    Raises:
        UserError: the source does not fit its config.json, or `out_dir` is in use.
    """
    hf_config, spec, dims = _read_config(hf_dir)
    source = SafetensorsDirectory(hf_dir)
    check_checkpoint(source, spec, dims)
    rules = spec.rules(dims)
    dtypes = {rule.mf_name: file_dtype(rule, dtype) or common_dtype(source, rule.hf_names) for rule in rules}
    blocks = (
        (rule.mf_name, fuse_blocks(rule, dims, _converting_reader(source, dtypes[rule.mf_name]))) for rule in rules
    )
    infos = [TensorInfo(rule.mf_name, dtypes[rule.mf_name], rule.mf_shape(dims)) for rule in rules]
    options = {"file_format": MINDFORMERS_FORMAT, "max_shard_bytes": MAX_SHARD_BYTES, "tokenizer_dir": hf_dir}
    config = with_dtype(hf_config, dtype) if dtype else without_drafts(hf_config)
    write_model_directory(blocks, infos, config, out_dir, **options)


def export_directory(mf_dir: str | os.PathLike, out_dir: str | os.PathLike, dtype: str | None = None) -> None:
    """Convert what `import_directory` wrote back to a Hugging Face directory, bit-exact unless `dtype` is given.

    Raises:
        UserError: the source does not fit its config.json, or `out_dir` is in use.
    """
    hf_config, spec, dims = _read_config(mf_dir)
    source = SafetensorsDirectory(mf_dir)
    rules = spec.rules(dims)
    source.check_coverage({rule.mf_name: rule.mf_shape(dims) for rule in rules})
    stored = {name: source.info(rule.mf_name).dtype for rule in rules for name in rule.hf_names}
    tensors = (
        tensor for rule in rules for tensor in zip(rule.hf_names, split_parts(rule, dims, source.read(rule.mf_name)))
    )
    write_hf(tensors, stored, hf_config, out_dir, dtype, tokenizer_dir=mf_dir)


def _read_config(model_dir: str | os.PathLike) -> tuple[dict, ModelSpec, ModelDims]:
    hf_config = read_hf_config(model_dir)
    spec = find_spec(hf_config)
    return hf_config, spec, spec.dims(hf_config)


def _converting_reader(source: TensorDirectory, dtype: str) -> Callable[[str], np.ndarray]:
    return lambda name: convert_dtype(source.read(name), source.info(name).dtype, dtype)


def describe_directory(model_dir: str | os.PathLike) -> str:
    """A short text about a model directory in either layout; its files are checked against its config.json.

    Raises:
        UserError: the files do not fit config.json.
    """
    _, spec, dims = _read_config(model_dir)
    source = open_tensors(model_dir)
    mf_shapes = {rule.mf_name: rule.mf_shape(dims) for rule in spec.rules(dims)}
    is_mindformers = set(source.names()) == set(mf_shapes)
    shapes = mf_shapes if is_mindformers else hf_shapes(spec, dims)
    source.check_coverage(shapes, frozenset() if is_mindformers else ignored_names(dims))
    kind = "Hugging Face" if isinstance(source, SafetensorsDirectory) else "shards of Hugging Face tensors, by rank"
    num_parameters = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    dtypes = sorted({source.info(name).dtype for name in shapes})
    lines = [
        f"directory     {Path(model_dir)}",
        f"architecture  {spec.hf_architecture}, {'tied' if dims.tied else 'untied'} embeddings",
        f"layout        {'MindFormers (mcore)' if is_mindformers else kind}",
        f"layers        {dims.num_layers}",
        f"hidden        {dims.hidden_size} (MLP {dims.intermediate_size})",
        f"heads         {dims.num_heads} query, {dims.num_kv_heads} key/value, {dims.head_dim} channels",
        f"vocabulary    {dims.vocab_size}",
        f"tensors       {len(shapes)}, {num_parameters:,} parameters, {', '.join(dtypes)}",
    ]
    if dims.experts:
        num_layers = sum(dims.experts.layers)
        lines.append(f"experts       {dims.num_experts} in {num_layers} layers, {dims.experts.num_active} per token")
    num_drafts = count_draft_tensors(source, dims)
    if num_drafts:
        lines.append(f"ignored       {num_drafts} tensors of {dims.num_draft_layers} multi-token prediction layers")
    return "\n".join(lines)
