"""Dtypes and shapes of the Hugging Face tensors of a model, in files and on their way to who reads them."""

from mindrlhf.specs import ModelDims, ModelSpec, ParameterRule
from mindrlhf.weights.tensors import STORAGE_DTYPES, TensorInfo


def hf_tensor_infos(model, dtype: str | None = None) -> list[TensorInfo]:
    """Name, dtype name and shape of every Hugging Face tensor of a `CausalLM`.

    Args:
        dtype: of those who read it; a tensor that they would round gets it, the others keep their own.
    """
    parameters = {parameter.name: parameter for parameter in model.get_parameters()}
    return [
        TensorInfo(name, buffer_dtype(rule, str(parameters[rule.mf_name].dtype).lower(), dtype), shape)
        for rule in model.spec.rules(model.dims)
        for name, shape in zip(rule.hf_names, rule.shape(model.dims))
    ]


def buffer_infos(spec: ModelSpec, dims: ModelDims, own: str, read: str) -> list[TensorInfo]:
    """As `hf_tensor_infos`, for a model that is not there; ``own`` is the dtype of its parameters."""
    return [
        TensorInfo(name, buffer_dtype(rule, file_dtype(rule, own), read), shape)
        for rule in spec.rules(dims)
        for name, shape in zip(rule.hf_names, rule.shape(dims))
    ]


def buffer_dtype(rule: ParameterRule, own: str, read: str | None) -> str:
    """The dtype of a rule's tensors on their way to readers that hold them as ``read``: never wider than their own."""
    wanted = file_dtype(rule, read) or own
    return wanted if STORAGE_DTYPES[wanted].itemsize < STORAGE_DTYPES[own].itemsize else own


def file_dtype(rule: ParameterRule, dtype: str | None) -> str | None:
    """The dtype of a rule's tensors in files of ``dtype``; None when they keep theirs."""
    return "float32" if dtype and rule.keeps_float32 else dtype
