"""Samples that one step of a run leaves over for the next, as a checkpoint keeps them.

In its files they are called carried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.weights.array_file import load_arrays, save_arrays
from mindrlhf.weights.tensors import array_infos

LEFTOVER_NAME = "carried.safetensors"


@dataclass(frozen=True)
class LeftoverSample:
    """One sample, or the beginning of one. Neither part may be changed once it is here."""

    record: Mapping[str, Any]  # JSON values
    arrays: Mapping[str, np.ndarray]  # by name: numbers or booleans of any shape


def leftover_records(samples: Sequence[LeftoverSample]) -> list[dict[str, Any]]:
    """Return what ``state.json`` says of the samples: each record, and the names of its arrays."""
    return [{"record": dict(sample.record), "arrays": sorted(sample.arrays)} for sample in samples]


def save_leftover(directory: Path, samples: Sequence[LeftoverSample]) -> None:
    """Write the arrays of the samples, if there are any, to ``carried.safetensors``."""
    arrays = {
        f"{index}.{name}": np.ascontiguousarray(array)
        for index, sample in enumerate(samples)
        for name, array in sample.arrays.items()
    }
    if arrays:
        save_arrays(directory / LEFTOVER_NAME, arrays.items(), array_infos(arrays))


def load_leftover(directory: Path, records: Sequence[Mapping[str, Any]]) -> list[LeftoverSample]:
    """Return the samples that ``leftover_records`` and ``save_leftover`` described.

    Raises:
        UserError: an array is missing or the file is damaged.
    """
    try:
        named = [(dict(entry["record"]), list(entry["arrays"])) for entry in records]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDirectory(f"{directory} is damaged: its leftover samples are no records ({error})") from error
    path = directory / LEFTOVER_NAME
    arrays = load_arrays(path) if any(names for _, names in named) else {}
    present = set(arrays)
    for index, (_, names) in enumerate(named):
        for name in names:
            if f"{index}.{name}" not in present:
                raise DamagedDirectory(f"{path} is damaged: it lacks the array {name!r} of leftover sample {index}")
    return [
        LeftoverSample(record, {name: arrays[f"{index}.{name}"] for name in names})
        for index, (record, names) in enumerate(named)
    ]
