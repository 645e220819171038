"""What a checkpoint of a run holds, and where in its directory.

    model/                  Hugging Face directory of the policy
    optimizer.safetensors   moments by parameter name, and the global step
    reference/              Hugging Face directory of the reference model, when it follows the policy
    critic/, critic_optimizer.safetensors
                            the same of the critic, when there is one
    carried.safetensors     arrays of the samples that are not trained on yet, when there are any
    evaluations.jsonl       what the final summary needs of each evaluation, a line each, when there are any
    state.json              everything else, all of it small; see RunState
    manifest.json           sizes and checksums, written last

No state of a random generator is among it: prompts, samples and evaluations use streams that depend only on
the seed and the step.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from mindrlhf.checkpoint.manifest import EVALUATIONS_NAME, DamagedDirectory, read_json_object
from mindrlhf.errors import UserError
from mindrlhf.system.json_lines import read_json_lines

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
_MAX_EVALUATION_BYTES = 1 << 30  # one that is longer than a line of a data file may be is no mistake


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


class EvaluationFile:
    """``evaluations.jsonl`` of the checkpoints that a process writes: one file under a name in each of them.

    A checkpoint appends the evaluations since the one before, so that each is written once; the manifest of each says
    how much of the file is its own.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._num_written = self._size_bytes = 0
        self._digest = xxhash.xxh3_64()

    def write(self, directory: Path, evaluations: list) -> dict[str, str]:
        """Give a checkpoint its file, if there are any evaluations.

        Args:
            directory: of the checkpoint.
            evaluations: JSON values; those that were written are the first of them.

        Returns:
            The XXH3-64 of the file in hex, by its name.

        Raises:
            TypeError: a value is no JSON value; the message names its place.
        """
        if not evaluations:
            return {}
        path = directory / EVALUATIONS_NAME
        if self._file is None or self._num_written > len(evaluations) or not _gave_name(self._file, path):
            self._begin(path)
        lines = []
        for index in range(self._num_written, len(evaluations)):
            _check_json(evaluations[index], f"evaluations[{index}]")
            lines.append(json.dumps(evaluations[index]).encode() + b"\n")
        new = b"".join(lines)
        self._file.seek(self._size_bytes)
        self._file.truncate()  # what a write that failed has left
        self._file.write(new)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._num_written, self._size_bytes = len(evaluations), self._size_bytes + len(new)
        self._digest.update(new)
        return {EVALUATIONS_NAME: self._digest.hexdigest()}

    def _begin(self, path: Path) -> None:
        if self._file is not None:
            self._file.close()
        path.unlink(missing_ok=True)
        self._file = open(path, "xb+")  # noqa: SIM115
        self._num_written = self._size_bytes = 0
        self._digest = xxhash.xxh3_64()


def _gave_name(file: BinaryIO, path: Path) -> bool:
    """Give an open file another name; False on a disk without links, and where it has no name any more."""
    try:
        # With a directory of the source Python calls linkat(2), which follows the link that a descriptor is.
        descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.link(str(file.fileno()), path, src_dir_fd=descriptors, follow_symlinks=True)
        finally:
            os.close(descriptors)
    except OSError:
        return False
    return True


def write_state(directory: Path, state: RunState, evaluations: EvaluationFile | None = None) -> dict[str, str]:
    """Write ``state.json`` and the evaluations. Tuples come back as lists; floats exactly, NaN and infinities too.

    Args:
        evaluations: of the run's checkpoints; None where there is only this one.

    Returns:
        The checksums that are known, XXH3-64 in hex by name.

    Raises:
        TypeError: a value is no JSON value; the message names its place.
    """
    small = dataclasses.replace(state, evaluations=[])
    values = {**dataclasses.asdict(small), "evaluations": len(state.evaluations)}
    for name, value in values.items():
        _check_json(value, name)
    checksums = (evaluations or EvaluationFile()).write(directory, state.evaluations)
    with open(directory / STATE_NAME, "w", encoding="utf-8") as file:
        json.dump({"format_version": FORMAT_VERSION, **values}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def read_state(directory: Path) -> RunState:
    """Read ``state.json``, which in older checkpoints has the evaluations too.

    Raises:
        DamagedDirectory: a file is missing, damaged, or of another format version.
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
    if type(values["evaluations"]) is int:
        values["evaluations"] = _read_evaluations(directory, values["evaluations"])
    for name, kind in fields.items():
        value = values[name]
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
            raise DamagedDirectory(f"{path} is damaged: {name} is {value!r}")
    return RunState(**values)


def _read_evaluations(directory: Path, number: int) -> list:
    """Return the first evaluations of the file; those that follow are of later checkpoints."""
    path = directory / EVALUATIONS_NAME
    try:
        lines = read_json_lines(path, _MAX_EVALUATION_BYTES) if number > 0 else iter(())
        found = list(itertools.islice((line.value for line in lines if line.error is None), max(0, number)))
    except OSError as error:
        raise DamagedDirectory(f"{path} cannot be read: {error.strerror}") from error
    except UserError as error:
        raise DamagedDirectory(f"{path} is damaged: {error}") from error
    if len(found) != number:
        raise DamagedDirectory(f"{path} is damaged: it has {len(found)} evaluations, not {number}")
    return found


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
