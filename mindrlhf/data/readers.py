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
    from pyarrow import DataType, RecordBatch

FORMATS = (".jsonl", ".json", ".parquet")
_SPACE = re.compile(r"[ \t\r\n]*")
# Rows of images are large, so that their batches are bounded by size.
PARQUET_BATCH_ROWS, PARQUET_BATCH_BYTES = 256, 64 << 20
# Of what a file unpacks to: a value that repeats takes next to nothing in it.
PARQUET_FREE_BYTES, PARQUET_MAX_RATIO = 256 << 20, 1000
MEMORY_BYTES, PARQUET_BATCH_MEMORY_BYTES = 1 << 30, 256 << 20
_OBJECT_BYTES = 64  # of a value in Python


@dataclass(frozen=True)
class RawRecord:
    """One JSON object or table row.

    ``number`` counts from 1: the line in JSONL, the line on which the object starts in a JSON array, the row in
    Parquet. ``position_bytes`` says how far into its file the reader is, for progress only; ``size_bytes`` about how
    much memory it takes, where that is not known from its file.
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
            if not file.read(1):
                raise UserError(f"{path} is empty: there is nothing to build from")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


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
    record = None
    for record in records:
        yield record
    if record is None:
        raise UserError(f"{path} holds no records: there is nothing to build from")


def _read_json_lines(path: Path) -> Iterator[RawRecord | BadRecord]:
    for line in read_json_lines(path, MAX_LINE_BYTES):
        if line.error is None:
            yield _checked(path, line.number, line.value, line.end_bytes)
        else:
            yield BadRecord(path, line.number, _reason(line.error), line.end_bytes)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        fix = "iconv -t UTF-8 makes it so" if error.object[:2] != b"\x1f\x8b" else "it is compressed, unpack it: gunzip"
        return f"not UTF-8 at byte {error.start} of the line: {fix}"
    if isinstance(error, json.JSONDecodeError):
        fix = "; one line is one record, or a .json file a list of them" if error.doc.strip() in ("{", "[") else ""
        return f"not valid JSON in column {error.colno}: {error.msg}{fix}"
    return f"not usable JSON: {error}"


def _checked(path: Path, number: int, fields: object, position_bytes: int) -> RawRecord | BadRecord:
    if isinstance(fields, dict):
        return RawRecord(path, number, fields, position_bytes)
    fix = "; a list of records is a file that ends in .json" if isinstance(fields, list) else ""
    return BadRecord(path, number, f"expected a JSON object, found {type(fields).__name__}{fix}", position_bytes)


def _first_character(path: Path) -> str:
    """Return the first character that is not white space; many ``.json`` data sets are JSON lines inside."""
    with path.open("rb") as file:
        file.seek(3 if file.read(3) == b"\xef\xbb\xbf" else 0)
        while chunk := file.read(4096):
            if stripped := chunk.lstrip():
                return chr(stripped[0])
    return ""


def _read_json_array(path: Path) -> Iterator[RawRecord | BadRecord]:
    """Decode the elements of an array one by one; only the text of the file is in memory as a whole."""
    repeated: list[str] = []  # keys that stand twice in the element that is being decoded

    def as_object(pairs: list[tuple[str, object]]) -> dict:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            repeated.append(duplicate_key(pairs))
        return fields

    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}: {error.reason}") from error
    decoder = json.JSONDecoder(object_pairs_hook=as_object)
    start, line = 0, 1
    while True:
        place = _SPACE.match(text, start).end()
        separator, end = text[place : place + 1], _SPACE.match(text, place + 1).end()
        if separator == "]" or (start == 0 and text[end : end + 1] == "]"):
            break
        if separator != ("," if start else "["):
            raise _damaged(path, line + text.count("\n", start, place), "expected ',' or ']' after an element")
        line, start = line + text.count("\n", start, end), end
        repeated.clear()
        try:
            element, end = decoder.raw_decode(text, start)
        except (RecursionError, ValueError) as error:
            raise _damaged(path, line, getattr(error, "msg", str(error))) from error
        position_bytes = path.stat().st_size * end // len(text)
        if repeated:
            yield BadRecord(path, line, f"not usable JSON: the key {repeated[0]!r} stands twice", position_bytes)
        else:
            yield _checked(path, line, element, position_bytes)
        line, start = line + text.count("\n", start, end), end
    end += separator == "["  # of an array without elements
    if text[end:].strip():
        raise _damaged(path, line + text.count("\n", start, end), "text after the end of the array")


def _damaged(path: Path, line: int, reason: str) -> UserError:
    # Without line borders there is no safe place to read on from, so skipping is not offered.
    return UserError(f"{path}:{line}: damaged JSON array: {reason}; fix it, or convert it to JSONL")


def _read_parquet(path: Path) -> Iterator[RawRecord | BadRecord]:
    import pyarrow
    import pyarrow.parquet

    size_bytes = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            metadata = file.metadata
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            table_bytes = sum(group.total_byte_size for group in groups)
            num_values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
            # What the file says may be a lie: then the memory is limited.
            if table_bytes + _OBJECT_BYTES * num_values > PARQUET_FREE_BYTES + PARQUET_MAX_RATIO * size_bytes:
                raise UserError(
                    f"{path} has {size_bytes} bytes and unpacks to more than {PARQUET_MAX_RATIO} times as many: "
                    "convert it to JSONL if that is meant"
                )
            fitting_rows = PARQUET_BATCH_BYTES * metadata.num_rows // max(1, table_bytes)
            batches = file.iter_batches(max(1, min(PARQUET_BATCH_ROWS, fitting_rows)))
            number = 0
            while True:
                with limited_memory():
                    batch = _plain(next(batches, None))
                if batch is None:
                    return
                if batch.nbytes > PARQUET_BATCH_MEMORY_BYTES:  # Python's objects take some times as much
                    raise MemoryError
                for fields in batch.to_pylist():
                    number += 1
                    position_bytes = size_bytes * number // metadata.num_rows
                    fields = {name: _without_nulls(value) for name, value in fields.items()}
                    yield RawRecord(path, number, fields, position_bytes, batch.nbytes // len(batch))
    except (MemoryError, pyarrow.ArrowMemoryError) as error:
        limit = f"{PARQUET_BATCH_MEMORY_BYTES >> 20} MiB"
        raise UserError(f"{path} has rows of which {PARQUET_BATCH_ROWS} take more than {limit}") from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a readable Parquet file: {reason}") from error


def _plain(batch: "RecordBatch | None") -> "RecordBatch | None":
    """Return rows with values in place of indices, at every depth, so that their size is what they stand for."""
    import pyarrow

    if batch is None:
        return None
    fields = [field.with_type(_plain_type(field.type)) for field in batch.schema]
    return batch if fields == list(batch.schema) else batch.cast(pyarrow.schema(fields))


def _plain_type(kind: "DataType") -> "DataType":
    """Return a type without dictionaries in it."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    fields = [kind.field(index).with_type(_plain_type(kind.field(index).type)) for index in range(kind.num_fields)]
    if types.is_struct(kind):
        return pyarrow.struct(fields)
    if types.is_map(kind):
        return pyarrow.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(fields[0], kind.list_size)
    return (pyarrow.large_list if types.is_large_list(kind) else pyarrow.list_)(fields[0]) if fields else kind


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
