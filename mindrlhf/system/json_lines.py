"""JSON lines, read one at a time in bounded memory: jsonlines.org, through the package of that name."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jsonlines

from mindrlhf.errors import UserError

# A line beyond this is no record: most likely a JSON file without line breaks. Parsed it takes many times its size.
MAX_LINE_BYTES = 8 << 20


class DuplicateKeyError(ValueError):
    """An object has two values of one name, of which most readers would keep the last without a word."""


@dataclass(frozen=True)
class JsonLine:
    """One line that is not blank.

    Attributes:
        number: of the line, from 1.
        end_bytes: where in its file it ends.
        has_end: whether it ends with a line break; the last line of a killed writer does not.
        value: what it holds.
        error: why it holds nothing: UnicodeDecodeError, json.JSONDecodeError, DuplicateKeyError, RecursionError (nested
            too deep) or another ValueError (a number of too many digits).
    """

    number: int
    end_bytes: int
    has_end: bool
    value: Any = None
    error: Exception | None = None


def read_json_lines(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[JsonLine]:
    """Yield the lines of a file; one that cannot be parsed comes with its error.

    Raises:
        UserError: a line is longer than ``max_line_bytes``; it is not parsed, and nothing after it is read.
        OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        lines = _BoundedLines(file, path, max_line_bytes)
        reader = jsonlines.Reader(lines, loads=parse_json)
        while True:
            value = error = None
            try:
                value = reader.read(allow_none=True, skip_empty=True)
            except EOFError:
                return
            except jsonlines.InvalidLineError as failure:
                error = failure.__cause__
            except RecursionError as failure:
                error = failure
            yield JsonLine(lines.number, lines.end_bytes, lines.has_end, value, error)


def parse_json(text: str) -> Any:
    """Parse JSON text.

    Raises:
        ValueError, RecursionError: see :class:`JsonLine`.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise DuplicateKeyError(f"the key {duplicate_key(pairs)!r} stands twice")
    return values


def duplicate_key(pairs: list[tuple[str, Any]]) -> str | None:
    """Return the first key that an object repeats, None when there is none."""
    seen = set()
    return next((key for key, _ in pairs if key in seen or seen.add(key)), None)


class _BoundedLines:
    """The lines of a file without their ends, and where the last one was."""

    def __init__(self, file: BinaryIO, path: Path, max_bytes: int):
        self._file = file
        self._path = path
        self._max_bytes = max_bytes
        self.number = self.end_bytes = 0
        self.has_end = True

    def __iter__(self) -> "_BoundedLines":
        return self

    def __next__(self) -> bytes:
        line = self._file.readline(self._max_bytes + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.end_bytes += len(line)
        if len(line) > self._max_bytes:
            limit = f"{self._max_bytes >> 20} MiB"
            raise UserError(f"{self._path}:{self.number}: line longer than {limit}; is it JSON lines?")
        self.has_end = line.endswith(b"\n")
        # Without the line end, or the parser would place a cut-off record's error on the next line.
        return line.rstrip(b"\r\n")
