"""Adapters added to the matrices that they belong to: W + s B A, of directories."""

import os
from collections.abc import Iterator

import numpy as np

from mindrlhf.specs import ModelDims, ModelSpec, find_spec
from mindrlhf.specs.lora import DOWN, UP
from mindrlhf.specs.scoring import SCORE_NAME
from mindrlhf.weights.adapters.config import PREFIX
from mindrlhf.weights.adapters.peft import AdapterDirectory, open_adapter
from mindrlhf.weights.convert import check_checkpoint, common_dtype, export_hf, hf_shapes
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.sharded import ShardedDirectory
from mindrlhf.weights.tensors import with_low_rank


def merge_adapter(
    base_dir: str | os.PathLike, adapter_dir: str | os.PathLike, out_dir: str | os.PathLike, dtype: str | None = None
) -> None:
    """Write a Hugging Face directory of a model with an adapter added to its matrices.

    Args:
        base_dir: of the model, which stays as it is.
        adapter_dir: in PEFT's format, or the shards of one.
        out_dir: must not exist yet.
        dtype: of the files; None keeps the base's.

    Raises:
        UserError: the directories do not fit each other, or ``out_dir`` is in use.
    """
    hf_config = read_hf_config(base_dir)
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    base, adapter = open_tensors(base_dir), open_adapter(adapter_dir)
    check_checkpoint(base, spec, dims)
    wanted = _shapes_found(adapter, spec, dims)
    adapter.check_coverage(wanted)

    def merged() -> Iterator[tuple[str, np.ndarray]]:
        for name in hf_shapes(spec, dims):
            module = PREFIX + name.removesuffix(".weight")
            if f"{module}.{DOWN}.weight" in wanted:
                factors = (adapter.read_float32(f"{module}.{factor}.weight") for factor in (DOWN, UP))
                yield name, with_low_rank(base.read(name), *factors, adapter.lora.scale)
            elif PREFIX + name in wanted:
                yield name, adapter.read_float32(PREFIX + name)
            else:
                yield name, base.read(name)

    files_dtype = dtype or common_dtype(base, tuple(hf_shapes(spec, dims)))
    export_hf(merged(), hf_config, out_dir, dtype=files_dtype, tokenizer_dir=base_dir)


def _shapes_found(
    adapter: AdapterDirectory | ShardedDirectory, spec: ModelSpec, dims: ModelDims
) -> dict[str, tuple[int, ...]]:
    """The tensors that an adapter must have, which are those of any of its model's matrices that it names."""
    found, shapes = set(adapter.names()), {}
    for name, shape in hf_shapes(spec, dims).items():
        down, up = (f"{PREFIX}{name.removesuffix('.weight')}.{factor}.weight" for factor in (DOWN, UP))
        if len(shape) == 2 and found & {down, up}:
            shapes |= {down: (adapter.lora.rank, shape[1]), up: (shape[0], adapter.lora.rank)}
        elif name == SCORE_NAME:
            shapes[PREFIX + name] = shape
    return shapes
