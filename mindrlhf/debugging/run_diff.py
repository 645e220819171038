"""The first step, and the first thing in it, in which two runs differ."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.resume import config_differences
from mindrlhf.config.parse import read_yaml
from mindrlhf.errors import UserError
from mindrlhf.observe.fingerprint import FINGERPRINT_NAME, PARTS
from mindrlhf.observe.records import read_jsonl
from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.tensors import convert_dtype

_CHECKPOINT_NAME = re.compile(r"step_\d{8,}")
_MAX_TEXT = 120


@dataclass(frozen=True)
class RunDifference:
    """Result of :func:`compare_runs`.

    Attributes:
        step: the first that differs, None when all steps that both runs have are the same.
        part: the first of ``PARTS`` that differs in it, "" when nothing does; "weights" without a step when only the
            files of the weights differ.
        num_steps: last step of each run.
        details: further findings, a line each.
    """

    step: int | None
    part: str
    num_steps: tuple[int, int]
    details: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """True when the runs are the same as far as both go."""
        return not self.part


def compare_runs(first: Path, second: Path) -> RunDifference:
    """Compare two run directories by their ``trajectory.jsonl``, then say more from the other files of both.

    Raises:
        UserError: a directory has no fingerprint, the two have no step in common, or a file is damaged.
    """
    one, other = _read_fingerprint(first), _read_fingerprint(second)
    common = sorted(one.keys() & other.keys())
    if not common:
        raise UserError(f"{first} and {second} have no step in common to compare")
    step, part = _first_difference(one, other, common)
    details = [] if step is None else _first_sample(first, second, step)
    if part in ("loss", "grad_norm"):
        details.append(f"{part}: {one[step].get(part)!r} and {other[step].get(part)!r}")
    if tensor := _first_tensor(first, second):
        details.append(tensor)
        part = part or "weights"
    details += _config_lines(first, second)
    return RunDifference(step, part, (max(one), max(other)), details)


def _first_difference(one: dict[int, dict], other: dict[int, dict], steps: list[int]) -> tuple[int | None, str]:
    for step in steps:
        for part in PARTS:
            if one[step].get(part) != other[step].get(part):
                return step, part
    return None, ""


def _read_fingerprint(run_dir: Path) -> dict[int, dict[str, Any]]:
    path = Path(run_dir) / FINGERPRINT_NAME
    if not path.is_file():
        raise UserError(f"no {path}: give the directory that `mindrlhf train` wrote")
    return {record["step"]: record for record in read_jsonl(path)}


def _first_sample(first: Path, second: Path, step: int) -> list[str]:
    """Return a line on the first sample of a step, of those that were written, that differs."""
    pair = []
    for run_dir in (first, second):
        path = Path(run_dir) / "samples.jsonl"
        records = read_jsonl(path) if path.is_file() else iter(())
        pair.append([record for record in records if record["step"] == step])
    for index, (one, other) in enumerate(zip(*pair)):
        for name in ("prompt", "completion", "rewards", "reward"):
            if one.get(name) != other.get(name):
                return [
                    f"sample {index + 1} of step {step}, {name}: {_short(one.get(name))} and {_short(other.get(name))}"
                ]
    return []


def _first_tensor(first: Path, second: Path) -> str:
    """Return a line on the first tensor of the first checkpoint of both runs that differs, "" when none does."""
    for name in sorted(_model_dirs(first) & _model_dirs(second)):
        one, other = open_tensors(Path(first) / name), open_tensors(Path(second) / name)
        if only := sorted(set(one.names()) ^ set(other.names())):
            return f"{name}: only one has {only[0]}"
        for tensor in one.names():
            info, kind = one.info(tensor), other.info(tensor)
            if info != kind:
                return f"{name}, {tensor}: {info.dtype} {list(info.shape)} and {kind.dtype} {list(kind.shape)}"
            arrays = one.read(tensor), other.read(tensor)
            if arrays[0].tobytes() != arrays[1].tobytes():
                wide = [convert_dtype(array, info.dtype, "float32").astype(np.float64) for array in arrays]
                return f"{name}, {tensor}: differ by up to {np.abs(wide[0] - wide[1]).max():.3g}"
    return ""


def _model_dirs(run_dir: Path) -> set[str]:
    """Return the model directories of a run relative to it; their names sort by step, the final one last."""
    found = {path.parent for path in Path(run_dir).glob("checkpoints/step_*/model/config.json")}
    found = {path for path in found if _CHECKPOINT_NAME.fullmatch(path.parent.name)}
    found |= {path.parent for path in Path(run_dir).glob("final/config.json")}
    return {str(path.relative_to(run_dir)) for path in found}


def _config_lines(first: Path, second: Path) -> Iterator[str]:
    paths = [Path(run_dir) / "config.yaml" for run_dir in (first, second)]
    if not all(path.is_file() for path in paths):
        return
    one, other = (read_yaml(path) for path in paths)
    for name in config_differences(one, other):
        if name != "run.output_dir":
            yield f"config {name}: {_look_up(one, name)} and {_look_up(other, name)}"


def _look_up(config: Any, dotted: str) -> str:
    for name in dotted.split("."):
        if not isinstance(config, dict) or name not in config:
            return "not set"
        config = config[name]
    return repr(config)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
