"""The files of a checkpoint of a run.

    model/              sharded directory of the policy and its optimiser's state: one shard of each where it is whole
    reference/          the weights of the reference model, when it follows the policy
    critic/             as model/, of the critic, when there is one
    state.json          everything else: "state" is a RunState, "progress" the evaluations and leftover samples
    state.safetensors   the arrays that state.json names
    manifest.json       sizes and checksums, written last

It has no state of a random generator: prompts, samples and evaluations use streams that depend only on the seed and
the step.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.algorithm_state import AlgorithmState
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.system.records import decode, encode, record
from mindrlhf.system.sizes import read_json_object
from mindrlhf.system.wire import ProtocolError
from mindrlhf.weights.array_file import ArrayFile, save_arrays
from mindrlhf.weights.tensors import array_infos

MODEL_NAME = "model"
REFERENCE_NAME = "reference"
CRITIC_NAME = "critic"
STATE_NAME = "state.json"
ARRAYS_NAME = "state.safetensors"
FORMAT_VERSION = 1
# Writes weights and optimiser state into a directory; returns the checksums that it took from the bytes it wrote,
# XXH3-64 in hex by relative path, of some or all files.
StateWriter = Callable[[Path], dict[str, str]]


@record
@dataclass(frozen=True)
class RunState:
    """Position of a run, and what it was run with."""

    step: int  # steps done
    weights_version: int  # versions published to the generator
    seed: int
    prompt_stream: dict[str, Any]  # PromptStream.state()
    config: dict[str, Any]  # the run's config as nested dicts
    algorithm: AlgorithmState = field(default_factory=AlgorithmState)
    data: dict[str, Any] = field(default_factory=dict)  # data_fingerprint() of the run's files


@dataclass(frozen=True)
class PackedState:
    """The content of ``state.json`` and ``state.safetensors``."""

    values: Mapping[str, Any]  # JSON values
    arrays: Mapping[str, np.ndarray]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def pack_state(state: RunState, progress: Mapping[str, Any] | None = None) -> PackedState:
    """Return a copy of a state, and of records by name, as a checkpoint has them; arrays are not copied.

    Raises:
        TypeError: a value is neither a JSON value nor a record; the message names its path.
    """
    values, arrays = encode({"state": state, "progress": dict(progress or {})})
    return PackedState(values, arrays)


def write_state(directory: Path, packed: PackedState) -> dict[str, str]:
    """Write a state; return the checksums that are known, XXH3-64 in hex by name."""
    checksum = None
    if packed.arrays:
        arrays = {name: np.ascontiguousarray(array) for name, array in packed.arrays.items()}
        checksum = save_arrays(directory / ARRAYS_NAME, arrays.items(), array_infos(arrays))
    with open(directory / STATE_NAME, "w", encoding="utf-8") as file:
        file.write(json.dumps({"format_version": FORMAT_VERSION, **packed.values}))
        file.flush()
        os.fsync(file.fileno())
    return {ARRAYS_NAME: checksum} if checksum else {}


def read_state(directory: Path) -> RunState:
    """Read the state of ``state.json``.

    Raises:
        DamagedDirectory: the file is missing, damaged, or of another format version.
    """
    path = directory / STATE_NAME
    state = _decode(path, {"state": _read(path).get("state")}, {})["state"]
    if not isinstance(state, RunState):
        raise DamagedDirectory(f"{path} is damaged: it holds no state")
    return state


def read_progress(directory: Path) -> dict[str, Any]:
    """Read the records that :func:`pack_state` was given; the modules that define them have to be imported.

    Raises:
        DamagedDirectory: a file is missing, damaged, or of another format version.
    """
    path = directory / STATE_NAME
    values = _read(path)
    arrays = ArrayFile(directory / ARRAYS_NAME) if (directory / ARRAYS_NAME).exists() else {}
    progress = _decode(path, {"progress": values.get("progress")}, arrays)["progress"]
    if not isinstance(progress, dict):
        raise DamagedDirectory(f"{path} is damaged: it holds no progress")
    return progress


def _read(path: Path) -> dict[str, Any]:
    values = read_json_object(path, kind=DamagedDirectory)
    if (version := values.get("format_version")) != FORMAT_VERSION:
        raise DamagedDirectory(f"{path} has format version {version!r}, this release reads {FORMAT_VERSION}")
    return values


def _decode(path: Path, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    try:
        return decode(values, arrays)
    except ProtocolError as error:
        raise DamagedDirectory(f"{path} is damaged: {error}") from error
