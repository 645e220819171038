"""Samples that one step of a run leaves over for the next, as a checkpoint keeps them.

In its files they are called carried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import numpy as np

from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.weights.array_file import load_arrays, save_arrays
from mindrlhf.weights.tensors import array_infos

LEFTOVER_NAME = "carried.safetensors"
T = TypeVar("T")


@dataclass(frozen=True)
class LeftoverSample:
    """One sample, or the beginning of one. Neither part may be changed once it is here."""

    record: Mapping[str, Any]  # JSON values
    arrays: Mapping[str, np.ndarray]  # by name: numbers or booleans of any shape


def pack(record: Any) -> LeftoverSample:
    """Return a dataclass of JSON values, arrays, tuples of files (bytes) and such dataclasses, alone or in tuples.

    A record within keeps its place among the JSON values; its arrays are named by their path ("prompt.prompt_ids").
    """
    values: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            inner = pack(value)
            values[field.name] = inner.record
            arrays |= {f"{field.name}.{name}": array for name, array in inner.arrays.items()}
        elif isinstance(value, np.ndarray):
            arrays[field.name] = value
        elif isinstance(value, tuple) and value and isinstance(value[0], bytes):
            values[field.name] = len(value)
            arrays |= {f"{field.name}.{i}": np.frombuffer(file, np.uint8) for i, file in enumerate(value)}
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            several = [pack(one) for one in value]
            values[field.name] = [one.record for one in several]
            named = [(f"{field.name}.{i}", one) for i, one in enumerate(several)]
            arrays |= {f"{name}.{own}": array for name, one in named for own, array in one.arrays.items()}
        else:
            values[field.name] = value
    return LeftoverSample(values, arrays)


def unpack(kind: type[T], sample: LeftoverSample) -> T:
    """Return what ``pack`` was called on; KeyError where a value without default is missing, or one too many."""
    found: dict[str, Any] = dict(sample.record)
    arrays = dict(sample.arrays)
    for field in fields(kind):
        value, inner = found.get(field.name), next(filter(is_dataclass, (field.type, *get_args(field.type))), None)
        if inner and isinstance(value, Mapping):
            found[field.name] = unpack(inner, LeftoverSample(value, _take(arrays, f"{field.name}.")))
        elif inner and isinstance(value, list):
            own = (LeftoverSample(one, _take(arrays, f"{field.name}.{i}.")) for i, one in enumerate(value))
            found[field.name] = tuple(unpack(inner, one) for one in own)
        elif field.name in arrays:
            found[field.name] = arrays.pop(field.name)
        elif get_origin(field.type) is tuple and isinstance(found.get(field.name), int):
            files = [arrays.pop(f"{field.name}.{i}") for i in range(found[field.name])]
            found[field.name] = tuple(file.tobytes() for file in files)
        elif get_origin(field.type) is tuple and field.name in found:
            found[field.name] = _tuples(found[field.name])
        elif is_dataclass(field.type) or field.name not in found and field.default is field.default_factory is MISSING:
            raise KeyError(field.name)
    for name in (*arrays, *(found.keys() - {field.name for field in fields(kind)})):
        raise KeyError(name)
    return kind(**found)


def _take(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): arrays.pop(name) for name in [*arrays] if name.startswith(prefix)}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def leftover_records(samples: Sequence[LeftoverSample]) -> list[dict[str, Any]]:
    return [{"record": dict(sample.record), "arrays": sorted(sample.arrays)} for sample in samples]


def save_leftover(directory: Path, samples: Sequence[LeftoverSample]) -> None:
    arrays = {
        f"{index}.{name}": np.ascontiguousarray(array)
        for index, sample in enumerate(samples)
        for name, array in sample.arrays.items()
    }
    if arrays:
        save_arrays(directory / LEFTOVER_NAME, arrays.items(), array_infos(arrays))


def load_leftover(directory: Path, records: Sequence[Mapping[str, Any]]) -> list[LeftoverSample]:
    """Return the samples; UserError where an array is missing or the file is damaged."""
    try:
        named = [(dict(entry["record"]), list(entry["arrays"])) for entry in records]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDirectory(f"{directory} is damaged: its carried-over samples are no records ({error})") from error
    path = directory / LEFTOVER_NAME
    arrays = load_arrays(path) if any(names for _, names in named) else {}
    present = set(arrays)
    for index, (_, names) in enumerate(named):
        for name in names:
            if f"{index}.{name}" not in present:
                raise DamagedDirectory(f"{path} is damaged: it lacks the array {name!r} of carried-over sample {index}")
    return [
        LeftoverSample(record, {name: arrays[f"{index}.{name}"] for name in names})
        for index, (record, names) in enumerate(named)
    ]
