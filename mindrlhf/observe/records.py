"""Records on disk: JSON lines that survive a kill and continue after a resume."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure, UserError


class JsonlWriter:
    """Append records with a ``step`` to a JSON lines file, each flushed as it is written.

    A run that starts (or resumes) at ``first_step`` is about to write the steps from there on: records of those
    steps that an earlier process left, and a last line it did not finish, are removed first. ``first_step`` 0
    starts the file over.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Open ``path``, whose directory is made if needed.

        Raises:
            UserError: a line before the last one is not a record.
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
        except OSError as failure:
            raise RunFailure(f"cannot write {self._path}: {failure.strerror}") from failure

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; numbers that JSON has no name for (NaN, infinities) become null."""
        try:
            self._file.write(_dump(record) + "\n")
            self._file.flush()
        except OSError as failure:
            raise RunFailure(f"cannot write {self._path}: {failure.strerror}") from failure

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def _truncate(self, first_step: int) -> None:
        kept = self._path.with_name(self._path.name + ".tmp")
        with open(kept, "w", encoding="utf-8", errors="backslashreplace") as file:
            for record in read_jsonl(self._path):
                if record["step"] < first_step:
                    file.write(_dump(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(kept, self._path)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON lines file, one at a time.

    A last line without an end is what a killed writer leaves: it is skipped when it is not a whole record.

    Raises:
        UserError: any other line is not a JSON object with an integer ``step``.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or not _is_step(record.get("step")):
                    raise ValueError("it is not an object with an integer 'step'")
            except (ValueError, RecursionError) as failure:
                if not line.endswith(b"\n"):
                    return
                raise UserError(f"{path}, line {number} is not a record of a run ({failure}): remove it") from None
            yield record


def replace_file(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the whole new one, never a part.

    Raises:
        RunFailure: the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as failure:
        partial.unlink(missing_ok=True)
        raise RunFailure(f"cannot write {path}: {failure.strerror}") from failure


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
