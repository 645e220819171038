"""Raw records from JSONL, JSON and Parquet files, one at a time, each with the place it came from.

A record that cannot be read comes out as a ``BadRecord`` in its place in the order, so that the caller
decides whether it ends the job. What makes the rest of a file unreadable is a ``UserError``.
"""

import contextlib
import json
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.system.json_lines import MAX_LINE_BYTES, parse_json, read_json_lines

FORMATS = (".jsonl", ".json", ".parquet")

# Rows of images are large, so that their batches are bounded by size.
PARQUET_BATCH_ROWS = 256
PARQUET_BATCH_BYTES = 64 << 20
MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class RawRecord:
    """One JSON object or table row.

    ``number`` counts from 1: the line in JSONL, the element of a JSON array, the row in Parquet. ``position_bytes``
    says how far into its file the reader is, for progress only; ``size_bytes`` about how much memory it takes, where
    that is not known from its file.
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
    """Yield the records of ``path`` in order, holding a bounded part of the file in memory; of a JSON array, its text.

    Raises:
        UserError: the file is absent, of unknown format, empty, or damaged past the point of reading on.
    """
    check_readable(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        records = _read_parquet(path)
    elif suffix == ".json" and _first_character(path) == "[":
        records = _read_json_array(path)
    else:
        records = _read_json_lines(path)
    num_records = 0
    for record in records:
        num_records += 1
        yield record
    if num_records == 0:
        raise UserError(f"{path} holds no records: there is nothing to build from")


def _read_json_lines(path: Path) -> Iterator[RawRecord | BadRecord]:
    for line in read_json_lines(path, MAX_LINE_BYTES):
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


def _read_json_array(path: Path) -> Iterator[RawRecord | BadRecord]:
    """Yield the elements of an array, numbered from 1; the array is in memory as a whole."""
    try:
        elements = parse_json(path.read_text(encoding="utf-8-sig"))
    except (RecursionError, ValueError) as error:  # also of what is not UTF-8
        raise UserError(f"{path} is a damaged JSON array ({error}): fix it, or convert it to JSONL") from error
    for number, fields in enumerate(elements, start=1):
        yield _checked(path, number, fields, path.stat().st_size * number // len(elements))


def _read_parquet(path: Path) -> Iterator[RawRecord | BadRecord]:
    import pyarrow
    import pyarrow.parquet

    size_bytes = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata, number = file.metadata, 0
            table_bytes = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
            fitting_rows = PARQUET_BATCH_BYTES * metadata.num_rows // max(1, table_bytes)
            for batch in file.iter_batches(max(1, min(PARQUET_BATCH_ROWS, fitting_rows))):
                for fields in batch.to_pylist():
                    number += 1
                    position_bytes = size_bytes * number // metadata.num_rows
                    fields = {name: _without_nulls(value) for name, value in fields.items()}
                    yield RawRecord(path, number, fields, position_bytes, batch.nbytes // len(batch))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a readable Parquet file: {reason}") from error


def _without_nulls(value: object) -> object:
    """Leave out null fields of objects at every depth: Arrow gives the objects of all rows the same fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Bound what the body may add to the memory of this process: a library then fails instead of the machine."""
    with open("/proc/self/statm", encoding="ascii") as file:
        own_bytes = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, own_bytes + MEMORY_BYTES) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
