"""Raw records from JSONL, JSON and Parquet files, one at a time, each with the place it came from.

A record that cannot be read comes out as a ``BadRecord`` in its place in the order, so that the caller
decides whether it ends the job. What makes the rest of a file unreadable is a ``UserError``.
"""

import contextlib
import json
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindrlhf.errors import UserError
from mindrlhf.system.json_lines import MAX_LINE_BYTES, duplicate_key, read_json_lines

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch
    from pyarrow.parquet import FileMetaData

FORMATS = (".jsonl", ".json", ".parquet")

# Of a line or array element.
MAX_RECORD_BYTES = MAX_LINE_BYTES
JSON_CHUNK_CHARS = 1 << 20
# Rows of images are large, so that their batches are bounded by size.
PARQUET_BATCH_ROWS = 256
PARQUET_BATCH_BYTES = 64 << 20
# Of what a file unpacks to: a value that repeats takes next to nothing in it. The largest row is one image file.
MAX_ROW_BYTES = 64 << 20
PARQUET_FREE_BYTES, PARQUET_FREE_VALUES, PARQUET_MAX_RATIO = 256 << 20, 10_000_000, 1000
PARQUET_MEMORY_BYTES = 2 << 30
MAX_DICTIONARY_BYTES = 2 << 20  # twice of what Arrow writes
_OBJECT_BYTES, _PAGE_HEADER_BYTES = 64, 16


@dataclass(frozen=True)
class RawRecord:
    """One JSON object or table row.

    ``number`` counts from 1: the line in JSONL, the line on which the object starts in a JSON array, the
    row in Parquet. ``position_bytes`` says how far into its file the reader is, for progress only; ``size_bytes`` about
    how much memory it takes, where that is not known from its file.
    """

    path: Path
    number: int
    fields: dict
    position_bytes: int
    size_bytes: int = 0


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
        size_bytes = path.stat().st_size
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_unpacked_sizes(path, size_bytes, file.metadata)
            repeated = _large_dictionaries(path, file.metadata)
        with pyarrow.parquet.ParquetFile(path, read_dictionary=repeated) as file:
            num_rows = file.metadata.num_rows
            table_bytes = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            fitting_rows = PARQUET_BATCH_BYTES * num_rows // max(1, table_bytes)
            batches = file.iter_batches(batch_size=max(1, min(PARQUET_BATCH_ROWS, fitting_rows)))
            number, unpacked_bytes = 0, 0
            for rows, num_bytes in _unpacked(batches):
                unpacked_bytes += num_bytes
                _check_unpacked(path, size_bytes, unpacked_bytes)
                for fields in rows:
                    number += 1
                    position_bytes = size_bytes * number // max(1, num_rows)
                    yield RawRecord(path, number, fields, position_bytes, num_bytes // len(rows))
    except (MemoryError, pyarrow.ArrowMemoryError) as error:
        limit = f"{MAX_ROW_BYTES >> 20} MiB"
        raise UserError(f"{path} has rows that take more than {limit} of memory: leave them out") from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a readable Parquet file: {reason}") from error


def _check_unpacked(path: Path, size_bytes: int, unpacked_bytes: int) -> None:
    if unpacked_bytes > PARQUET_FREE_BYTES + PARQUET_MAX_RATIO * size_bytes:
        raise UserError(
            f"{path} has {size_bytes} bytes and unpacks to more than {PARQUET_MAX_RATIO} times as many: convert it to "
            "JSONL if that is meant"
        )


def _check_unpacked_sizes(path: Path, size_bytes: int, metadata: "FileMetaData") -> None:
    """Look at what a file says of its sizes, before anything is unpacked. It may lie: then the memory is limited."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    objects_bytes = _OBJECT_BYTES * metadata.num_rows * metadata.num_columns
    _check_unpacked(path, size_bytes, objects_bytes + sum(group.total_byte_size for group in groups))
    for group in groups:
        num_values = max((group.column(index).num_values for index in range(group.num_columns)), default=0)
        if group.total_byte_size > MAX_ROW_BYTES * max(1, group.num_rows) or (
            num_values > PARQUET_FREE_VALUES + PARQUET_MAX_RATIO * group.num_rows
        ):
            sizes = f"{group.num_rows} rows of {num_values} values and {group.total_byte_size} bytes"
            raise UserError(f"{path} has {sizes}: too large for records")


def _large_dictionaries(path: Path, metadata: "FileMetaData") -> list[str]:
    """Return the columns whose repeated values are large together: they stay indices until a row is read."""
    names = {}
    with path.open("rb") as file:
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page:
                    file.seek(column.dictionary_page_offset)
                    if _page_bytes(file.read(_PAGE_HEADER_BYTES)) > MAX_DICTIONARY_BYTES:
                        names[column.path_in_schema] = None
    return list(names)


def _page_bytes(header: bytes) -> int:
    """Return the size of a page once unpacked: the second field of its header, in Thrift's compact protocol.

    Source: https://github.com/apache/parquet-format (PageHeader), https://github.com/apache/thrift (compact protocol).
    """
    values, place = [], 0
    for _ in range(2):  # the type of the page, its size: each a head for "the next field, i32", and a number
        if header[place : place + 1] != b"\x15":
            return MAX_ROW_BYTES
        number, shift, place = 0, 0, place + 1
        while place < len(header):
            number |= (header[place] & 0x7F) << shift
            shift, place = shift + 7, place + 1
            if not header[place - 1] & 0x80:
                break
        values.append(number >> 1)  # zigzag, and never negative
    return values[1]


def _unpacked(batches: Iterator["RecordBatch"]) -> Iterator[tuple[list[dict], int]]:
    """Yield rows, some at a time, and how many bytes they take together."""
    while True:
        with _limited_memory():
            batch = next(batches, None)
        if batch is None:
            return
        waiting = [batch] if batch.num_rows else []
        while waiting:
            part = waiting.pop()
            num_bytes = sum(map(_unpacked_bytes, part.columns))
            if num_bytes > PARQUET_BATCH_BYTES and part.num_rows > 1:
                half = part.num_rows // 2
                waiting += [part.slice(half), part.slice(0, half)]
                continue
            if num_bytes > MAX_ROW_BYTES and part.num_rows == 1:
                raise MemoryError
            with _limited_memory():
                rows = _plain(part).to_pylist()
            yield rows, num_bytes


def _plain(rows: "RecordBatch") -> "RecordBatch":
    """Return rows with texts in place of indices, of which each would be looked up by itself."""
    from pyarrow import RecordBatch, types

    columns = [one.dictionary_decode() if types.is_dictionary(one.type) else one for one in rows.columns]
    return RecordBatch.from_arrays(columns, names=rows.schema.names)


def _unpacked_bytes(values: "Array") -> int:
    """Return about how many bytes Python's objects for these values take."""
    from pyarrow import compute, types

    num_bytes, kind = _OBJECT_BYTES * len(values), values.type
    if types.is_dictionary(kind):
        text = values.dictionary
        if types.is_binary(text.type) or types.is_string(text.type):
            return num_bytes + (compute.sum(compute.binary_length(text).take(values.indices)).as_py() or 0)
        return num_bytes + len(values) * _unpacked_bytes(text)
    if types.is_struct(kind) or types.is_map(kind):
        parts = values.flatten() if types.is_struct(kind) else (values.keys, values.items)
        return num_bytes + sum(map(_unpacked_bytes, parts))
    if types.is_nested(kind):
        return num_bytes + _unpacked_bytes(values.flatten())
    if types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind):
        return num_bytes + (compute.sum(compute.binary_length(values)).as_py() or 0)
    return num_bytes


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Bound what the body may add to the memory of this process: Arrow then fails instead of the machine."""
    with open("/proc/self/statm", encoding="ascii") as file:
        own_bytes = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, own_bytes + PARQUET_MEMORY_BYTES) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
