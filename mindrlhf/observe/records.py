"""Records on disk: JSON lines that survive a kill and continue after a resume."""

import collections
import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jsonlines
import numpy as np

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system.files import write_file
from mindrlhf.system.json_lines import parse_json, read_json_lines

_BLOCK_BYTES = 1 << 18

GUARDS_NAME = "guards.jsonl"  # what the guards of a run have seen
ALARM, ALARM_OVER = "alarm", "alarm_over"  # events there: a run learns nothing; that holds no more


class JsonlWriter:
    """Append records with a ``step`` to a JSON lines file, each flushed as it is written.

    A run that starts (or resumes) at ``first_step`` is about to write the steps from there on. So the file is cut after
    the last record of a step before it: records that an earlier process left, and a line it did not finish, go. What
    stays is not read. ``first_step`` 0 starts the file over.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Open ``path``, whose directory is made if needed.

        Raises:
            UserError: a line that goes, and is not the last, is not a record.
            RunFailure: the file cannot be written.
        """
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if first_step > 0 and self._path.exists():
                self._truncate(first_step)
            # A lone surrogate (a broken escape in the data) becomes its JSON escape instead of an error.
            mode = "a" if first_step > 0 else "w"
            self._file = open(self._path, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            self._writer = jsonlines.Writer(self._file, dumps=_dump, flush=True)
        except OSError as failure:
            raise RunFailure(f"cannot write {self._path}: {failure.strerror}") from failure

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; numbers that JSON has no name for (NaN, infinities) become null."""
        try:
            self._writer.write(record)
        except OSError as failure:
            raise RunFailure(f"cannot write {self._path}: {failure.strerror}") from failure

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a record that could not be written, as was said then
            self._file.close()

    def _truncate(self, first_step: int) -> None:
        with open(self._path, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            for start, line in _lines_from_the_end(file):
                if line.strip():
                    step = self._step(line)
                    if step is not None and step < first_step:
                        break
                end = start
            file.truncate(end)
            file.seek(max(0, end - 1))
            if file.read(1) not in (b"", b"\n"):
                file.write(b"\n")

    def _step(self, line: bytes) -> int | None:
        """Return the step of a record; None for what a killed writer has left."""
        with contextlib.suppress(ValueError, RecursionError):
            record = parse_json(line.decode())
            if isinstance(record, dict) and _is_step(record.get("step")):
                return record["step"]
        if line.endswith(b"\n"):
            collections.deque(read_jsonl(self._path), maxlen=0)  # which names the line
        return None


def _lines_from_the_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, the last first: where each starts, and its bytes with its end."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start > 0:
        size = min(start, _BLOCK_BYTES + len(rest))  # so that a line of many blocks is not joined for each of them
        start -= size
        file.seek(start)
        block = file.read(size) + rest
        end = len(block)
        while (before := block.rfind(b"\n", 0, end - 1)) >= 0:
            yield start + before + 1, block[before + 1 : end]
            end = before + 1
        rest = block[:end]
    if rest:
        yield 0, rest


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON lines file, one at a time.

    A last line without an end is what a killed writer leaves: it is skipped when it is not a whole record.

    Raises:
        UserError: any other line is not a JSON object with an integer ``step``.
    """
    for line in read_json_lines(Path(path)):
        reason = line.error
        if reason is None and not (isinstance(line.value, dict) and _is_step(line.value.get("step"))):
            reason = "it is not an object with an integer 'step'"
        if reason is None:
            yield line.value
        elif line.has_end:
            raise UserError(f"{path}, line {line.number} is not a record of a run ({reason}): remove it")


def replace_file(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the whole new one, never a part.

    Raises:
        UserError, RunFailure: it cannot have this path; it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text, errors="replace")
    except OSError as failure:
        is_wrong = isinstance(failure, (FileExistsError, IsADirectoryError, NotADirectoryError))
        raise (UserError if is_wrong else RunFailure)(f"cannot write {path}: {failure.strerror}") from failure


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _dump(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
