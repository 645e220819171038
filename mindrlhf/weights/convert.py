"""Between a model (or MindFormers-named arrays) and logical Hugging Face tensors, driven by the `ModelSpec`."""

import os
from collections.abc import Callable, Iterator

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
    checkpoint = SafetensorsDirectory(model_dir)
    checkpoint.check_coverage(hf_shapes(model.spec, model.dims), ignored_names(model.dims))
    load_tensors(model, lambda name, dtype: convert_dtype(checkpoint.read(name), checkpoint.info(name)[0], dtype))


def load_random_weights(model, seed: int) -> None:
    """Give a `CausalLM` the weights of `random_hf_weights`."""
    tensors = dict(random_hf_weights(model.hf_config, seed))
    load_tensors(model, lambda name, dtype: convert_dtype(tensors[name], "float32", dtype))


def load_tensors(model, read: Callable[[str, str], np.ndarray]) -> None:
    """Fill every parameter from `read(Hugging Face name, dtype name)`."""
    import mindspore as ms

    parameters = {parameter.name: parameter for parameter in model.get_parameters()}
    for rule in model.spec.rules(model.dims):
        parameter = parameters[rule.mf_name]
        parts = [read(name, _dtype_name(parameter)) for name in rule.hf_names]
        # The copy keeps the parameter from sharing a read-only file mapping.
        data = np.array(fuse(rule, model.dims, parts), order="C")
        parameter.set_data(ms.Tensor(data.view(np.dtype(ms.dtype_to_nptype(parameter.dtype)))))


def iter_hf_tensors(model, share: int = 0, num_shares: int = 1) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every Hugging Face tensor of a `CausalLM`: live views where layouts agree, copies where they differ.

    bfloat16 comes as uint16 bit patterns. With `num_shares` above 1 only those of `share` come: the shares are
    disjoint, together complete, and about equal in size, so that several ranks can divide the work.
    """
    parameters = {parameter.name: parameter for parameter in model.get_parameters()}
    rules = sorted(model.spec.rules(model.dims), key=lambda rule: -parameters[rule.mf_name].size)
    loads = [0] * num_shares
    for rule in rules:
        parameter = parameters[rule.mf_name]
        lightest = loads.index(min(loads))
        loads[lightest] += parameter.size
        if lightest == share:
            parts = split(rule, model.dims, parameter.asnumpy().view(STORAGE_DTYPES[_dtype_name(parameter)]))
            yield from zip(rule.hf_names, parts)


def hf_tensor_infos(model) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype name and shape of what `iter_hf_tensors` yields, without touching data."""
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
