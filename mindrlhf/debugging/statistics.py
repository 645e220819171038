"""What msprobe's files say of a value: type, shape and statistics."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Save = Callable[[str, np.ndarray], str]  # name and array -> name of the file


def describe(value: Any, name: str, save: Save | None = None) -> Any:
    """Return a value as msprobe's JSON holds it: lists and dicts as they are, with a description for each leaf.

    Args:
        value: arrays, MindSpore tensors, strings, numbers and None, in lists, tuples and dicts.
        name: of the value; those of its parts are appended to it, after dots.
        save: writes each array; None when only its statistics are kept.
    """
    if isinstance(value, Mapping):
        return {key: describe(part, f"{name}.{key}", save) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(part, f"{name}.{index}", save) for index, part in enumerate(value)]
    if isinstance(value, np.ndarray):
        return _describe_array(value, "numpy.ndarray", str(value.dtype), name, save)
    if hasattr(value, "asnumpy"):
        dtype = str(value.dtype)
        # NumPy has no bfloat16; float32 holds each of its values.
        array = (value.float() if dtype == "BFloat16" else value).asnumpy()
        return _describe_array(array, "mindspore.Tensor", dtype, name, save)
    if isinstance(value, np.generic):
        value = value.item()
    return {"type": type(value).__name__, "value": value}


def _describe_array(array: np.ndarray, kind: str, dtype: str, name: str, save: Save | None) -> dict[str, Any]:
    described = {"type": kind, "dtype": dtype, "shape": list(array.shape), **_statistics(array)}
    # Beside what msprobe knows: statistics may agree where bits do not.
    described["crc32"] = f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
    if save is not None:
        described["data_name"] = save(name, array)
    return described


def _statistics(array: np.ndarray) -> dict[str, float | bool | None]:
    """Return extremes, mean and Euclidean norm, summed up in float64; None where there is no such number."""
    if array.size == 0:
        return dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    extremes = {"Max": array.max().item(), "Min": array.min().item()}
    if array.dtype == np.bool_:
        return extremes | {"Mean": None, "Norm": None}
    wide = array.astype(np.float64).ravel()
    with np.errstate(all="ignore"):
        return extremes | {"Mean": float(wide.mean()), "Norm": float(np.sqrt(wide @ wide))}
