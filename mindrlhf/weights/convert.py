"""Between a model (or MindFormers-named arrays) and logical Hugging Face tensors, driven by the `ModelSpec`."""

import os
from collections.abc import Iterator

import numpy as np

from mindrlhf.models.layouts import fuse, split
from mindrlhf.models.spec import ModelDims, ModelSpec, find_spec
from mindrlhf.weights.hf import STORAGE_DTYPES, SafetensorsDirectory, convert_dtype

OUTPUT_NAME = "lm_head.weight"


def hf_shapes(spec: ModelSpec, dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Shape of every Hugging Face tensor of a model, by name, in the order of the forward pass."""
    return {name: shape for rule in spec.rules(dims) for name, shape in zip(rule.hf_names, rule.shape(dims))}


def ignored_names(dims: ModelDims) -> frozenset[str]:
    """Names that a checkpoint may hold although the model does not need them: the output of a tied model."""
    return frozenset({OUTPUT_NAME}) if dims.tied else frozenset()


def load_hf_weights(model, model_dir: str | os.PathLike) -> None:
    """Load a Hugging Face directory into a `CausalLM`, converting to its parameter dtype, one tensor at a time.

    Raises:
        UserError: names or shapes do not fit the model, or a file is damaged; nothing has been loaded then.
    """
    import mindspore as ms

    spec, dims = model.spec, model.dims
    checkpoint = SafetensorsDirectory(model_dir)
    checkpoint.check_coverage(hf_shapes(spec, dims), ignored_names(dims))
    parameters = {parameter.name: parameter for parameter in model.get_parameters()}
    for rule in spec.rules(dims):
        parameter = parameters[rule.mf_name]
        dtype = _dtype_name(parameter)
        parts = [convert_dtype(checkpoint.read(name), checkpoint.info(name)[0], dtype) for name in rule.hf_names]
        # The copy keeps the parameter from sharing the read-only file mapping.
        data = np.array(fuse(rule, dims, parts), order="C")
        parameter.set_data(ms.Tensor(data.view(np.dtype(ms.dtype_to_nptype(parameter.dtype)))))


def iter_hf_tensors(model) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every Hugging Face tensor of a `CausalLM`: live views where layouts agree, copies where they differ.

    bfloat16 comes as uint16 bit patterns.
    """
    parameters = {parameter.name: parameter for parameter in model.get_parameters()}
    for rule in model.spec.rules(model.dims):
        parameter = parameters[rule.mf_name]
        parts = split(rule, model.dims, parameter.asnumpy().view(STORAGE_DTYPES[_dtype_name(parameter)]))
        yield from zip(rule.hf_names, parts)


def hf_tensor_infos(model) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype name and shape of what `iter_hf_tensors` yields, in the same order, without touching data."""
    parameters = {parameter.name: parameter for parameter in model.get_parameters()}
    return [
        (name, _dtype_name(parameters[rule.mf_name]), shape)
        for rule in model.spec.rules(model.dims)
        for name, shape in zip(rule.hf_names, rule.shape(model.dims))
    ]


def _dtype_name(parameter) -> str:
    return str(parameter.dtype).lower()


def random_hf_weights(hf_config: dict, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield random float32 tensors: normal(0, initializer_range) matrices, norms one, biases zero.

    Each tensor depends on `seed` and its own name only.
    """
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    for name, shape in hf_shapes(spec, dims).items():
        if name.endswith("bias"):
            yield name, np.zeros(shape, np.float32)
        elif len(shape) == 1:
            yield name, np.ones(shape, np.float32)
        else:
            generator = np.random.default_rng([seed, *name.encode()])
            yield name, generator.standard_normal(shape, dtype=np.float32) * np.float32(dims.initializer_range)
