"""Prompt files: MindRecord with a header that says what the records are.

The header is JSON in the schema description of the MindRecord file itself. A file is two files,
``NAME`` and its index ``NAME.db``; they may be moved together but not renamed, because MindRecord keeps
the name in the index. Both load with ``mindspore.dataset.MindDataset`` too.
"""

import json
import os
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.mindrecord_checksum import SLOT, checksums, verify_checksums
from mindrlhf.data.pictures.columns import SCHEMA, ImageHeader, image_columns, image_files, parse_image_header
from mindrlhf.errors import NotThere, UserError
from mindrlhf.images.pixels import decode_png
from mindrlhf.system.files import scratch_directory, sync
from mindrlhf.system.records import record

FORMAT = "mindrlhf-prompts"
FORMAT_VERSION = 2  # since 2: checksums of the file and its index
# What a record of each task has beside its prompt: a pair's preferred response comes first.
RESPONSES = {"prompts": (), "sft": ("response",), "preference": ("response", "rejected")}
TASKS = tuple(RESPONSES)

# MindRecord's defaults (16 MiB and 32 MiB) make small files large: a page table of 1 MiB serves some 5,000 pages.
HEADER_SIZE_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20  # MindRecord's default
_LENGTH = struct.Struct("<Q")
PAGE_SIZE_BYTES = 8 << 20
FORBIDDEN_IN_NAMES = set(r'\/:*?"<>|`&;' + "'")


def no_ids() -> np.ndarray:
    """Return an empty int32 array."""
    return np.zeros(0, np.int32)


@record
@dataclass(frozen=True)
class Prompt:
    """One prompt, as a prompt file holds it and a run carries it."""

    prompt_ids: np.ndarray  # int32 [prompt]
    response_ids: np.ndarray  # int32 [response], end token included; empty for task prompts
    answer: str
    source_id: str
    rejected_ids: np.ndarray = field(default_factory=no_ids)  # likewise; empty unless the task is preference
    verifier: str = ""  # names of the verifiers it chooses, separated by commas
    image_files: tuple[bytes, ...] = ()  # PNG, in the order of their tokens in the prompt
    extra: Mapping[str, Any] = field(default_factory=dict)  # JSON values: the columns of its row that were kept

    @property
    def source(self) -> str:
        """Source that the data names, else the name of the file that was read."""
        return self.source_id.partition(":")[0]

    @property
    def images(self) -> tuple[np.ndarray, ...]:
        """The images, unpacked at each call: uint8 ``[height, width, 3]`` each."""
        return tuple(decode_png(file) for file in self.image_files)


@dataclass(frozen=True)
class PromptFileHeader:
    """Settings and counts of a build. Lengths are in tokens."""

    task: str  # a key of RESPONSES
    tokenizer_fingerprint: str
    template: str
    template_sha256: str
    handler: str
    num_read: int
    num_kept: int
    num_bad: int
    num_too_long: int
    max_prompt_length: int
    max_length: int | None  # limit of prompt + response; None for task prompts
    longest_prompt: int
    longest_response: int
    format_version: int = FORMAT_VERSION
    verifier_choices: tuple[str, ...] = ()  # the records' distinct values of ``verifier``; empty when all are ""
    images: ImageHeader | None = None  # None when no record has an image
    template_options: dict = field(default_factory=dict)  # values of the template's variables, for all records
    template_source: str = ""  # of a chat template from a file; the tokenizer has the others
    columns: tuple[str, ...] = ()  # names of the kept columns, the keys of every record's ``extra``
    look: dict = field(default_factory=dict)  # counts of what stands out in the data as a whole: see ``build``


def write_prompt_file(
    path: Path,
    schema: Mapping[str, dict],
    batches: Iterable[Sequence[Prompt]],
    header: Callable[[], PromptFileHeader],
) -> PromptFileHeader:
    """Write the records of ``batches`` and a header to ``path`` and ``path.db``; return the header.

    Either both files are there and whole afterwards, or the error leaves what was there before. A machine
    that dies between the two renames leaves a file without index, which ``PromptFile.open`` refuses.

    Args:
        schema: the columns, see ``columns``.
        header: called once all records are written, when what it counts is known.

    Raises:
        UserError: MindRecord takes no such name, or cannot write there.
    """
    check_output_path(path)
    with scratch_directory(path.parent, ".mindrecord-") as directory:
        # MindRecord stores the name, so the temporary part is the directory.
        temporary = directory / path.name
        written = _write_records(temporary, schema, batches, header)
        _write_header(temporary, written)
        _publish(temporary, path)
    return written


def check_output_path(path: Path) -> None:
    """Raise ``UserError`` when a prompt file cannot be written at ``path``."""
    if path.is_dir():
        raise UserError(f"output {path} is a directory; name a file, such as {path / 'train.mindrecord'}")
    if not path.parent.is_dir():
        raise UserError(f"no such directory for the output: {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write into {path.parent}: choose another --output")
    forbidden = FORBIDDEN_IN_NAMES & set(path.name)
    if forbidden or path.name != path.name.strip():
        raise UserError(
            f"MindRecord does not take the file name {path.name!r}: no spaces at the ends, and none of "
            + " ".join(sorted(FORBIDDEN_IN_NAMES))
        )


def columns(task: str, *, verifier: bool = False, extra: bool = False, images: bool = False) -> dict[str, dict]:
    """Return the schema of a file of a task: with verifiers that records choose, kept columns, or images.

    MindDataset reads an empty array as garbage, so prompts have no response column.
    """
    ids, text = {"type": "int32", "shape": [-1]}, {"type": "string"}
    schema = {"prompt_ids": ids, **{f"{name}_ids": ids for name in RESPONSES[task]}, "answer": text, "source_id": text}
    schema |= {name: text for name, is_there in (("verifier", verifier), ("extra", extra)) if is_there}
    return schema | SCHEMA if images else schema


def _write_records(
    path: Path,
    schema: Mapping[str, dict],
    batches: Iterable[Sequence[Prompt]],
    header: Callable[[], PromptFileHeader],
) -> PromptFileHeader:
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), shard_num=1)
    writer.set_header_size(HEADER_SIZE_BYTES)
    writer.set_page_size(PAGE_SIZE_BYTES)
    writer.add_schema(dict(schema), FORMAT)
    writer.add_index(["source_id"])
    num_written = 0
    for batch in batches:
        rows = [_row(record, schema) for record in batch]
        if rows:  # MindRecord refuses an empty list
            with _one_line_errors(f"MindRecord cannot write {path.name} (if its disk is full, make room)"):
                writer.write_raw_data(rows)
            num_written += len(rows)  # rows that do not fit the schema were taken out, with a mere warning
    written = header()
    assert num_written == written.num_kept, f"wrote {num_written} records, the header says {written.num_kept}"
    with _one_line_errors(f"MindRecord cannot write {path.name} (if its disk is full, make room)"):
        writer.commit()
    return written


def _row(record: Prompt, schema: Mapping[str, dict]) -> dict[str, object]:
    values = {name: getattr(record, name) for name in schema if name not in SCHEMA}
    if "extra" in schema:
        values["extra"] = json.dumps(record.extra)
    return values | (image_columns(record.image_files) if SCHEMA.keys() <= schema.keys() else {})


def _write_header(path: Path, header: PromptFileHeader) -> None:
    """Put our header into MindRecord's, as the description of its schema, and the checksums behind it.

    A MindRecord file starts with the length of its own header (uint64, little endian) and the header (JSON).
    """
    with path.open("r+b") as file:
        layout = json.loads(file.read(*_LENGTH.unpack(file.read(_LENGTH.size))))
        layout["schema"][0]["desc"] = json.dumps({"format": FORMAT, **asdict(header)})
        text = json.dumps(layout, separators=(",", ":")).encode()
        if _LENGTH.size + len(text) + SLOT.size > HEADER_SIZE_BYTES:
            raise UserError(f"{path.name} has too many pages for its header: build several files")
        file.seek(0)
        file.write((_LENGTH.pack(len(text)) + text).ljust(HEADER_SIZE_BYTES, b"\0"))
        file.flush()
        slot = checksums(path, index_path(path), HEADER_SIZE_BYTES)
        file.seek(HEADER_SIZE_BYTES - SLOT.size)
        file.write(slot)


def _publish(temporary: Path, path: Path) -> None:
    """Give the finished pair its name. Without its index a file is refused, so no mixed pair is ever read."""
    index, temporary_index = index_path(path), index_path(temporary)
    # MindRecord makes its files private; other users' training jobs read them too.
    readable = temporary.with_name("mode")
    readable.touch()
    for file in (temporary, temporary_index):
        shutil.copymode(readable, file)
        sync(file)
    index.unlink(missing_ok=True)
    os.replace(temporary, path)
    os.replace(temporary_index, index)
    sync(path.parent)


def index_path(path: Path) -> Path:
    return path.with_name(path.name + ".db")


class PromptFile:
    """A prompt file open for reading. Opening verifies the whole file; records are read on demand."""

    def __init__(self, path: Path, header: PromptFileHeader):
        self.path = path
        self.header = header

    @classmethod
    def open(cls, path: str | Path, tokenizer_fingerprint: str | None = None) -> "PromptFile":
        """Open ``path``; MindSpore is not imported before the first ``read``.

        Args:
            path: the MindRecord file; its ``.db`` must lie beside it.
            tokenizer_fingerprint: of the tokenizer that will read the ids; None skips the comparison.

        Raises:
            UserError: absent, empty, truncated, damaged, renamed or foreign file, or another tokenizer's.
        """
        path = Path(path)
        description, header_size_bytes = _read_description(path)
        if not index_path(path).is_file():
            raise UserError(f"{path} has no index {path.name}.db: copy it along, or build the file again")
        verify_checksums(path, index_path(path), header_size_bytes)
        header = _parsed(path, description)
        _check_name(path)
        if tokenizer_fingerprint is not None and tokenizer_fingerprint != header.tokenizer_fingerprint:
            raise UserError(
                f"{path} was built with tokenizer {header.tokenizer_fingerprint[:12]}, this run has "
                f"{tokenizer_fingerprint[:12]}: build it again with this run's tokenizer, or change tokenizer_dir"
            )
        return cls(path, header)

    def __len__(self) -> int:
        return self.header.num_kept

    def read(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the records at ``indices``, in that order; an index may come more than once.

        One call costs about 10 ms whatever the number of records, so read a batch at a time.

        Raises:
            UserError: MindRecord cannot read the file.
        """
        wanted = [int(index) for index in indices]
        for index in wanted:
            if not 0 <= index < len(self):
                raise IndexError(f"record {index} of {self.path}, which has {len(self)}")
        if not wanted:
            return []
        # The sampler takes at most as many indices as there are records.
        distinct = sorted(set(wanted))
        records = dict(zip(distinct, self._read_distinct(distinct), strict=True))
        return [records[index] for index in wanted]

    def _read_distinct(self, indices: list[int]) -> list[Prompt]:
        from mindspore.dataset import MindDataset, SubsetSampler

        with _one_line_errors(f"cannot read {self.path}, build it again if it is damaged"):
            dataset = MindDataset(str(self.path), num_parallel_workers=1, sampler=SubsetSampler(indices))
            rows = list(dataset.create_dict_iterator(num_epochs=1, output_numpy=True))
        return [
            Prompt(
                prompt_ids=row["prompt_ids"],
                response_ids=row.get("response_ids", no_ids()),
                answer=row["answer"].item(),
                source_id=row["source_id"].item(),
                rejected_ids=row.get("rejected_ids", no_ids()),
                verifier=row["verifier"].item() if "verifier" in row else "",
                image_files=image_files(row),
                extra=json.loads(row["extra"].item()) if "extra" in row else {},
            )
            for row in rows
        ]


def read_identity(path: Path) -> tuple[PromptFileHeader, str]:
    """Return the header of a prompt file and the checksum in it (hex), which ``PromptFile.open`` verifies.

    Raises:
        UserError: absent, empty, truncated or foreign file, or one of another version.
    """
    description, header_size_bytes = _read_description(path)
    with path.open("rb") as file:
        file.seek(header_size_bytes - SLOT.size)
        return _parsed(path, description), SLOT.unpack(file.read(SLOT.size))[1].hex()


def _read_description(path: Path) -> tuple[dict[str, Any], int]:
    """Return our header, and the size in bytes of the page that holds it, without MindSpore; see ``_write_header``.

    Raises:
        UserError: absent, empty, truncated or foreign file, or one of another version.
    """
    if not path.is_file():
        raise NotThere(f"no prompt file at {path}: build one with 'mindrlhf data build'")
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise UserError(f"{path} is empty: build it again with 'mindrlhf data build'")
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            layout = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        description = json.loads(layout["schema"][0]["desc"])
        is_ours = description.pop("format") == FORMAT
        header_size_bytes = int(layout["header_size"])
        ends = [page["page_id"] * layout["page_size"] + page["page_size"] for page in layout["page"]]
        end_bytes = header_size_bytes + max(ends)
        is_ours = is_ours and SLOT.size <= header_size_bytes <= MAX_HEADER_BYTES
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        is_ours = False
    if not is_ours:
        raise UserError(f"{path} is not a prompt file: build one with 'mindrlhf data build'")
    version = description.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version}, this release reads {FORMAT_VERSION}: build it again")
    if size_bytes < end_bytes:
        raise UserError(f"{path} is truncated ({size_bytes} of {end_bytes} bytes): build it again")
    return description, header_size_bytes


def _parsed(path: Path, description: dict[str, Any]) -> PromptFileHeader:
    try:
        images = description.get("images")
        lists = {name: tuple(description.get(name, ())) for name in ("verifier_choices", "columns")}
        return PromptFileHeader(**description | lists | {"images": images and parse_image_header(images)})
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} has a damaged header ({error}): build it again") from error


def _check_name(path: Path) -> None:
    """Raise ``UserError`` if a file was renamed: MindRecord keeps the name in the index."""
    try:
        with _open_index(path) as database:
            ((name,),) = database.execute("SELECT NAME FROM SHARD_NAME")
    except (sqlite3.Error, ValueError) as error:
        raise UserError(f"the index {index_path(path)} is damaged ({error}): build the file again") from error
    if name != path.name:
        raise UserError(f"{path} was renamed: MindRecord needs its first name, so rename both files to {name}[.db]")


def _open_index(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(f"{index_path(path).absolute().as_uri()}?mode=ro", uri=True))


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Turn MindRecord's error of many lines into a ``UserError`` with the one that says what is wrong."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reasons = [line.removeprefix("[ERROR]").strip() for line in lines if line.startswith("[ERROR]")]
        raise UserError(f"{what}: {[*reasons, *lines, 'no reason given'][0]}") from error
