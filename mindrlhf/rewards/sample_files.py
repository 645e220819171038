"""Completions to be scored, in JSON lines, and what comes out of scoring them."""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonlines

from mindrlhf.data.handlers import SAMPLE_NAMES
from mindrlhf.errors import UserError
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.types import RewardInput, RewardResult
from mindrlhf.system.files import whole_file
from mindrlhf.system.json_lines import DuplicateKeyError, JsonLine, read_json_lines

# What is in flight at once, however long the file.
MAX_WINDOW_SAMPLES = 2048
MAX_WINDOW_CHARS = 32 << 20

NUM_FAILURES_SHOWN = 5

_FIELDS = {"completion": str, "answer": str, "prompt": str, "finish_reason": str, "num_tokens": int}
_FIELDS |= {"completions": list, "extra": dict}
_KIND_WORDS = {str: "text", int: "an integer", list: "a list of texts", dict: "an object of columns"}
_REQUIRED = ("completion", "answer")
_SCORES = ("reward", "rewards", "failures", "unscored", "step")  # what an earlier scoring, or a run, has added


@dataclass(frozen=True)
class SampleLine:
    """One line of a samples file: all its fields, and what of them is scored."""

    number: int  # of the line, from 1
    fields: Mapping[str, Any]
    sample: RewardInput


def read_samples(path: Path, needed: Container[str] = ()) -> Iterator[SampleLine | UserError]:
    """Yield the samples of a file, one at a time, and in place of each malformed line the error that names it.

    A line is a JSON object with ``completion`` and ``answer``, and perhaps ``prompt``, ``finish_reason``,
    ``num_tokens``, ``completions`` (of all samples of the prompt) and ``extra`` (the prompt's columns by name). Other
    fields are columns too, and are carried along. Blank lines are left out.

    Args:
        path: the file.
        needed: optional fields that the verifiers do need.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        for line in read_json_lines(path):
            try:
                yield _sample_line(line, needed)
            except UserError as error:
                yield UserError(f"{path}:{line.number}: {error}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


class SkippedLines:
    """The good lines of ``lines``; a malformed one is an error, or if ``is_allowed`` only counted."""

    def __init__(self, lines: Iterable[SampleLine | UserError], *, is_allowed: bool):
        self._lines = lines
        self._is_allowed = is_allowed
        self._errors: list[str] = []
        self._num_skipped = 0

    def __iter__(self) -> Iterator[SampleLine]:
        for line in self._lines:
            if isinstance(line, SampleLine):
                yield line
            elif not self._is_allowed:
                raise UserError(f"{line}: fix the line, or leave bad lines out with rewards score --skip-bad")
            else:
                self._num_skipped += 1
                self._errors += [f"  {line}"] if len(self._errors) < NUM_FAILURES_SHOWN else []

    def summary(self) -> list[str]:
        """Return lines that say how many were left out, and name the first of them; nothing when none was."""
        return [f"{self._num_skipped} malformed lines were left out", *self._errors] if self._num_skipped else []


def score_lines(pool: RewardPool, lines: Iterable[SampleLine]) -> Iterator[tuple[SampleLine, RewardResult]]:
    """Score the lines in windows of bounded size; yield each with its result, in order."""
    window: list[SampleLine] = []
    num_chars = 0
    for line in lines:
        window.append(line)
        num_chars += len(line.sample.completion) + len(line.sample.prompt) + len(line.sample.answer)
        if len(window) >= MAX_WINDOW_SAMPLES or num_chars >= MAX_WINDOW_CHARS:
            yield from zip(window, pool.score([line.sample for line in window]))
            window, num_chars = [], 0
    yield from zip(window, pool.score([line.sample for line in window]))


class ScoreWriter:
    """Writes scored lines to a file, or to standard output, and counts them.

    The file gets its name when it is whole: an error leaves what was there before.

    Raises:
        UserError: the file cannot be written there.
    """

    def __init__(self, path: Path | None):
        self._files = contextlib.ExitStack()
        try:
            self._file = sys.stdout if path is None else self._files.enter_context(whole_file(path, "w"))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        # Escaped, since completions may hold lone surrogates.
        self._writer = jsonlines.Writer(self._file, dumps=json.dumps)
        self.num_samples = 0
        self._total = 0.0
        self._failures: Counter[str] = Counter()
        self._unscored: Counter[str] = Counter()

    def __enter__(self) -> "ScoreWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._file.flush()
        finally:
            self._files.__exit__(*exception)

    def write(self, line: SampleLine, result: RewardResult) -> None:
        self._writer.write(scored_record(line, result))
        self.num_samples += 1
        self._unscored.update([result.unscored] if result.unscored else [])
        self._total += 0.0 if result.unscored else result.total
        self._failures.update(f"{name}: {reason}" for name, reason in result.failures.items())

    def summary(self) -> list[str]:
        """Return lines that say how many there were, the mean reward, and the most frequent failures."""
        num_scored = self.num_samples - self._unscored.total()
        mean = f"mean reward {self._total / num_scored:.6g}" if num_scored else "no mean reward"
        lines = [f"{self.num_samples} samples, {mean}, {self._failures.total()} failures"]
        lines += [f"  {count} x {reason}" for reason, count in self._failures.most_common(NUM_FAILURES_SHOWN)]
        unscored = [f"  {count} x {reason}" for reason, count in self._unscored.most_common(NUM_FAILURES_SHOWN)]
        lost = f"{self._unscored.total()} of {self.num_samples} not scored, which the mean leaves out"
        return [*lines, *([lost, *unscored] if unscored else [])]


def scored_record(line: SampleLine, result: RewardResult) -> dict[str, Any]:
    """Return a record of the output: the fields of the input with ``reward``, ``rewards`` and ``failures``."""
    record = {**line.fields, "reward": None if result.unscored else result.total, "rewards": result.parts}
    if result.unscored:
        record["unscored"] = result.unscored
    if result.failures:
        record["failures"] = result.failures
    return record


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"the line is not JSON ({error.msg} at character {error.pos + 1})"
    if isinstance(error, UnicodeDecodeError):
        return "the line is not UTF-8 text"
    if isinstance(error, DuplicateKeyError):
        return f"in the line {error}"
    if isinstance(error, RecursionError):
        return "the line is nested too deeply"
    return "the line has a number of too many digits"


def _sample_line(line: JsonLine, needed: Container[str]) -> SampleLine:
    if line.error is not None:
        raise UserError(_reason(line.error))
    fields = line.value
    if not isinstance(fields, dict):
        raise UserError(f"the line holds a {type(fields).__name__}, not an object with 'completion' and 'answer'")
    values = {}
    for name, kind in _FIELDS.items():
        if name not in fields:
            if name in _REQUIRED or name in needed:
                raise UserError(f"there is no field '{name}'")
            continue
        value = fields[name]
        if name == "answer" and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"field '{name}' must be {_KIND_WORDS[kind]}, found {type(value).__name__}")
        if kind is list:
            if not all(isinstance(text, str) for text in value):
                raise UserError(f"field '{name}' must be {_KIND_WORDS[kind]}, found other items in it")
            value = tuple(value)
        taken = [column for column in value if column in SAMPLE_NAMES] if kind is dict else []
        if taken:
            raise UserError(f"'extra' holds '{taken[0]}', which reward functions know as something else: rename it")
        values[name] = value
    known = {*_FIELDS, *SAMPLE_NAMES, *_SCORES}
    values["extra"] = {name: value for name, value in fields.items() if name not in known} | values.get("extra", {})
    return SampleLine(line.number, fields, RewardInput(index=line.number, **values))
