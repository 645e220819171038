"""Samples that one step of a run hands on to the next, as a checkpoint keeps them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.weights.array_file import load_arrays, save_arrays
from mindrlhf.weights.tensors import array_infos

CARRIED_NAME = "carried.safetensors"


@dataclass(frozen=True)
class CarriedSample:
    """One sample, or the beginning of one. Neither part may be changed once it is here."""

    record: Mapping[str, Any]  # JSON values
    arrays: Mapping[str, np.ndarray]  # by name: numbers or booleans of any shape


def carried_records(samples: Sequence[CarriedSample]) -> list[dict[str, Any]]:
    """Return what ``state.json`` says of the samples: each record, and the names of its arrays."""
    return [{"record": dict(sample.record), "arrays": sorted(sample.arrays)} for sample in samples]


def save_carried(directory: Path, samples: Sequence[CarriedSample]) -> None:
    """Write the arrays of the samples, if there are any, to ``carried.safetensors``."""
    arrays = {
        f"{index}.{name}": np.ascontiguousarray(array)
        for index, sample in enumerate(samples)
        for name, array in sample.arrays.items()
    }
    if arrays:
        save_arrays(directory / CARRIED_NAME, arrays.items(), array_infos(arrays))


def load_carried(directory: Path, records: Sequence[Mapping[str, Any]]) -> list[CarriedSample]:
    """Return the samples that ``carried_records`` and ``save_carried`` described.

    Raises:
        UserError: an array is missing or the file is damaged.
    """
    try:
        named = [(dict(entry["record"]), list(entry["arrays"])) for entry in records]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDirectory(f"{directory} is damaged: its carried samples are no records ({error})") from error
    path = directory / CARRIED_NAME
    arrays = load_arrays(path) if any(names for _, names in named) else {}
    present = set(arrays)
    for index, (_, names) in enumerate(named):
        for name in names:
            if f"{index}.{name}" not in present:
                raise DamagedDirectory(f"{path} is damaged: it lacks the array {name!r} of carried sample {index}")
    return [
        CarriedSample(record, {name: arrays[f"{index}.{name}"] for name in names})
        for index, (record, names) in enumerate(named)
    ]
