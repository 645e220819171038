"""Raw records from JSONL, JSON and Parquet files, one at a time, each with the place it came from.

A record that cannot be read comes out as a ``BadRecord`` in its place in the order, so that the caller
decides whether it ends the job. What makes the rest of a file unreadable is a ``UserError``.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.system.json_lines import MAX_LINE_BYTES, duplicate_key, read_json_lines

FORMATS = (".jsonl", ".json", ".parquet")

# Of a line or array element.
MAX_RECORD_BYTES = MAX_LINE_BYTES
JSON_CHUNK_CHARS = 1 << 20
# Rows of images are large, so that their batches are bounded by size.
PARQUET_BATCH_ROWS = 256
PARQUET_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class RawRecord:
    """One JSON object or table row.

    ``number`` counts from 1: the line in JSONL, the line on which the object starts in a JSON array, the
    row in Parquet. ``position_bytes`` says how far into its file the reader is, for progress only.
    """

    path: Path
    number: int
    fields: dict
    position_bytes: int


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used and why; ``str()`` gives ``file:number: reason``."""

    path: Path
    number: int
    reason: str
    position_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.reason}"


def check_readable(path: Path) -> None:
    """Raise ``UserError`` unless ``path`` is a non-empty file of a known format that this process may read."""
    if path.is_dir():
        raise UserError(f"{path} is a directory; name the data files in it")
    if not path.is_file():
        raise UserError(f"no such data file: {path}")
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"cannot tell the format of {path}: its name must end in {', '.join(FORMATS)}")
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if is_empty:
        raise UserError(f"{path} is empty: there is nothing to build from")


def read_records(path: Path) -> Iterator[RawRecord | BadRecord]:
    """Yield the records of ``path`` in order, holding a bounded part of the file in memory.

    Raises:
        UserError: the file is absent, of unknown format, empty, or damaged past the point of reading on.
    """
    check_readable(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        records = _read_parquet(path)
    elif suffix == ".json" and _first_character(path) == "[":
        records = _JsonArrayReader(path).read()
    else:
        records = _read_json_lines(path)
    num_records = 0
    for record in records:
        num_records += 1
        yield record
    if num_records == 0:
        raise UserError(f"{path} holds no records: there is nothing to build from")


def _read_json_lines(path: Path) -> Iterator[RawRecord | BadRecord]:
    for line in read_json_lines(path, MAX_RECORD_BYTES):
        if line.error is None:
            yield _checked(path, line.number, line.value, line.end_bytes)
        else:
            yield BadRecord(path, line.number, _reason(line.error), line.end_bytes)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start} of the line"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at column {error.colno}"
    return f"not usable JSON: {error}"


def _checked(path: Path, number: int, fields: object, position_bytes: int) -> RawRecord | BadRecord:
    if isinstance(fields, dict):
        return RawRecord(path, number, fields, position_bytes)
    return BadRecord(path, number, f"expected a JSON object, found {type(fields).__name__}", position_bytes)


def _first_character(path: Path) -> str:
    """Return the first character that is not white space; many ``.json`` data sets are JSON lines inside."""
    with path.open("rb") as file:
        file.seek(3 if file.read(3) == b"\xef\xbb\xbf" else 0)
        while chunk := file.read(4096):
            if stripped := chunk.lstrip():
                return chr(stripped[0])
    return ""


class _JsonArrayReader:
    """Decode a JSON array element by element through a sliding window of text."""

    _space = re.compile(r"[ \t\r\n]*")

    def __init__(self, path: Path):
        self._path = path
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)
        self._duplicate_key: str | None = None  # the first in the element that is being decoded
        self._window = ""
        self._start = 0  # where in the window the next token starts
        self._line = 1  # line of self._start
        self._at_end = False

    def read(self) -> Iterator[RawRecord | BadRecord]:
        with self._path.open(encoding="utf-8-sig", newline="") as self._file:
            try:
                yield from self._read_elements()
            except UnicodeDecodeError as error:
                raise UserError(f"{self._path} is not UTF-8 after line {self._line}: {error.reason}") from error

    def _read_elements(self) -> Iterator[RawRecord | BadRecord]:
        assert self._next_character() == "[", "the caller looked at the first character"
        self._advance(self._start + 1)
        if self._next_character() == "]":
            return
        while True:
            self._skip_space()
            line, fields, position_bytes = self._line, self._decode_element(), self._file.buffer.tell()
            if self._duplicate_key is None:
                yield _checked(self._path, line, fields, position_bytes)
            else:
                reason = f"not usable JSON: the key {self._duplicate_key!r} stands twice"
                yield BadRecord(self._path, line, reason, position_bytes)
            separator = self._next_character()
            if separator == "]":
                return self._check_tail()
            if separator != ",":
                raise self._damaged("expected ',' or ']' after an element")
            self._advance(self._start + 1)

    def _check_tail(self) -> None:
        self._advance(self._start + 1)
        if self._next_character():
            raise self._damaged("text after the end of the array")

    def _decode_element(self) -> object:
        while True:
            self._duplicate_key = None
            try:
                element, end = self._decoder.raw_decode(self._window, self._start)
            except (RecursionError, ValueError) as error:
                # Either cut off by the window, or damaged: only more text can tell.
                if self._at_end or not isinstance(error, json.JSONDecodeError):
                    raise self._damaged(getattr(error, "msg", str(error))) from error
            else:
                # A number at the edge of the window may go on in the next chunk.
                if end < len(self._window) or self._at_end:
                    self._advance(end)
                    return element
            if len(self._window) - self._start > MAX_RECORD_BYTES:
                raise self._damaged(f"no complete element within {MAX_RECORD_BYTES >> 20} MiB")
            self._grow()

    def _object(self, pairs: list[tuple[str, object]]) -> dict:
        # Not an error yet: the element may be cut off by the window, and what follows it can still be read.
        fields = dict(pairs)
        if len(fields) < len(pairs):
            self._duplicate_key = self._duplicate_key or duplicate_key(pairs)
        return fields

    def _next_character(self) -> str:
        """Return the next character that is not white space, or "" at the end of the file."""
        self._skip_space()
        return self._window[self._start : self._start + 1]

    def _skip_space(self) -> None:
        while True:
            self._advance(self._space.match(self._window, self._start).end())
            if self._start < len(self._window) or self._at_end:
                return
            self._grow()

    def _advance(self, end: int) -> None:
        self._line += self._window.count("\n", self._start, end)
        self._start = end

    def _grow(self) -> None:
        # Doubling keeps the repeated attempts at one long element linear in its length.
        chunk = self._file.read(max(JSON_CHUNK_CHARS, len(self._window) - self._start))
        self._at_end = not chunk
        self._window = self._window[self._start :] + chunk
        self._start = 0

    def _damaged(self, reason: str) -> UserError:
        # Without line borders there is no safe place to read on from, so skipping is not offered.
        return UserError(f"{self._path}:{self._line}: damaged JSON array: {reason}; mend it, or convert it to JSONL")


def _read_parquet(path: Path) -> Iterator[RawRecord | BadRecord]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            size_bytes, num_rows = path.stat().st_size, file.metadata.num_rows
            table_bytes = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            fitting_rows = PARQUET_BATCH_BYTES * num_rows // max(1, table_bytes)
            number = 0
            for batch in file.iter_batches(batch_size=max(1, min(PARQUET_BATCH_ROWS, fitting_rows))):
                for fields in batch.to_pylist():
                    number += 1
                    yield RawRecord(path, number, fields, size_bytes * number // num_rows)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is not a readable Parquet file: {reason}") from error
