"""What a checkpoint of a run holds, and where in its directory.

    model/                  Hugging Face directory of the policy
    optimizer.safetensors   moments by parameter name, and the global step
    reference/              Hugging Face directory of the reference model, when it follows the policy
    critic/, critic_optimizer.safetensors
                            the same of the critic, when there is one
    carried.safetensors     arrays of the samples that are not trained on yet, when there are any
    state.json              everything small; see RunState
    manifest.json           sizes and checksums, written last

No state of a random generator is among it: prompts, samples and evaluations use streams that depend only on
the seed and the step.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindrlhf.checkpoint.manifest import DamagedDirectory, read_json_object

MODEL_NAME = "model"
REFERENCE_NAME = "reference"
OPTIMIZER_NAME = "optimizer.safetensors"
CRITIC_NAME = "critic"
CRITIC_OPTIMIZER_NAME = "critic_optimizer.safetensors"
STATE_NAME = "state.json"
FORMAT_VERSION = 2
# Writes weights and optimiser state into a directory; returns the checksums that it took from the bytes it wrote,
# XXH3-64 in hex by relative path, of some or all files.
StateWriter = Callable[[Path], dict[str, str]]


@dataclass(frozen=True)
class RunState:
    """Where a run is, as JSON values: dicts with text keys, lists, text, numbers, true, false and None."""

    step: int  # steps done
    weights_version: int  # versions published to the generator
    seed: int
    prompt_stream: dict  # PromptStream.state()
    config: dict  # the run's config as nested dicts
    evaluations: list  # what the final summary needs of each evaluation so far
    algorithm_state: dict = field(default_factory=dict)  # AlgorithmState.to_json()
    carried: list = field(default_factory=list)  # leftover_records() of the samples that are not trained on yet
    data: dict = field(default_factory=dict)  # data_fingerprint() of the run's files; empty in older checkpoints
    teachers: dict = field(default_factory=dict)  # digest of the directory of each teacher, by the key that names it


def write_state(directory: Path, state: RunState) -> None:
    """Write ``state.json``. Tuples come back as lists; floats come back exactly, NaN and infinities too.

    Raises:
        TypeError: a value is no JSON value; the message names its place.
    """
    values = dataclasses.asdict(state)
    for name, value in values.items():
        _check_json(value, name)
    with open(directory / STATE_NAME, "w", encoding="utf-8") as file:
        json.dump({"format_version": FORMAT_VERSION, **values}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_state(directory: Path) -> RunState:
    """Read ``state.json``.

    Raises:
        DamagedDirectory: the file is missing, damaged, or of another format version.
    """
    path = directory / STATE_NAME
    values = read_json_object(path)
    version = values.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise DamagedDirectory(f"{path} has format version {version!r}, this release reads {FORMAT_VERSION}")
    values = {"data": {}, "teachers": {}, **values}
    fields = {item.name: item.type for item in dataclasses.fields(RunState)}
    if values.keys() != fields.keys():
        raise DamagedDirectory(f"{path} is damaged: {min(values.keys() ^ fields.keys())!r} is missing or unknown")
    for name, kind in fields.items():
        value = values[name]
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
            raise DamagedDirectory(f"{path} is damaged: {name} is {value!r}")
    return RunState(**values)


def _check_json(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{place} has the key {name!r}: JSON keys are text")
            _check_json(item, f"{place}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(item, f"{place}[{index}]")
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError(f"{place} is {value!r}: a {type(value).__name__} is no JSON value")
