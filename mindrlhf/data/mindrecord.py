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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.mindrecord_checksum import read_checksum, verify_checksums, write_checksums
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
        """Where it comes from: what the data says, else the name of the file that was read."""
        return self.source_id.partition(":")[0]

    @property
    def images(self) -> tuple[np.ndarray, ...]:
        """The images, unpacked at each call: uint8 ``[height, width, 3]`` each."""
        return tuple(decode_png(file) for file in self.image_files)


@dataclass(frozen=True)
class PromptFileHeader:
    """What was built, from what. Lengths are in tokens."""

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


def write_prompt_file(path: Path, header: PromptFileHeader, batches: Iterable[Sequence[Prompt]]) -> None:
    """Write ``header`` and the records of ``batches`` to ``path`` and ``path.db``.

    Either both files are there and whole afterwards, or the error leaves what was there before. A machine
    that dies between the two renames leaves a file without index, which ``PromptFile.open`` refuses.

    Raises:
        UserError: MindRecord takes no such name, or cannot write there.
    """
    check_output_path(path)
    with scratch_directory(path.parent, ".mindrecord-") as directory:
        # MindRecord stores the name, so the temporary part is the directory.
        temporary = directory / path.name
        num_written = _write(temporary, header, batches)
        assert num_written == header.num_kept, f"wrote {num_written} records, the header says {header.num_kept}"
        write_checksums(temporary, index_path(temporary), HEADER_SIZE_BYTES)
        _publish(temporary, path)


def check_output_path(path: Path) -> None:
    """Raise ``UserError`` when a prompt file cannot be written at ``path``."""
    if path.is_dir():
        raise UserError(f"output {path} is a directory; name a file, such as {path / 'train.mindrecord'}")
    if not path.parent.is_dir():
        raise UserError(f"no such directory for the output: {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write into {path.parent}")
    forbidden = FORBIDDEN_IN_NAMES & set(path.name)
    if forbidden or path.name != path.name.strip():
        raise UserError(
            f"MindRecord does not take the file name {path.name!r}: no spaces at the ends, and none of "
            + " ".join(sorted(FORBIDDEN_IN_NAMES))
        )


def _write(path: Path, header: PromptFileHeader, batches: Iterable[Sequence[Prompt]]) -> int:
    from mindspore.mindrecord import FileWriter

    columns = _columns(header)
    writer = FileWriter(str(path), shard_num=1)
    writer.set_header_size(HEADER_SIZE_BYTES)
    writer.set_page_size(PAGE_SIZE_BYTES)
    writer.add_schema(columns, json.dumps({"format": FORMAT, **_description(header)}))
    writer.add_index(["source_id"])
    num_written = 0
    for batch in batches:
        rows = [_row(record, columns) for record in batch]
        if rows:  # MindRecord refuses an empty list
            with _one_line_errors(f"MindRecord cannot write {path.name}"):
                writer.write_raw_data(rows)
            num_written += len(rows)  # rows that do not fit the schema were taken out, with a mere warning
    with _one_line_errors(f"MindRecord cannot write {path.name}"):
        writer.commit()
    return num_written


def _row(record: Prompt, columns: Mapping[str, object]) -> dict[str, object]:
    values = {name: getattr(record, name) for name in columns if name not in SCHEMA}
    if "extra" in columns:
        values["extra"] = json.dumps(record.extra)
    return values | (image_columns(record.image_files) if SCHEMA.keys() <= columns.keys() else {})


def _description(header: PromptFileHeader) -> dict:
    """Return the header's fields. Files without what came later stay readable by older releases."""
    values = asdict(header)
    for name in ("verifier_choices", "images", "columns", "template_options", "template_source", "look"):
        if not values[name]:
            del values[name]
    return values


def _columns(header: PromptFileHeader) -> dict:
    """Return the schema. MindDataset reads an empty array as garbage, so prompts have no response column."""
    columns = {
        "prompt_ids": {"type": "int32", "shape": [-1]},
        "response_ids": {"type": "int32", "shape": [-1]},
        "answer": {"type": "string"},
        "source_id": {"type": "string"},
        "rejected_ids": {"type": "int32", "shape": [-1]},
        "verifier": {"type": "string"},
        "extra": {"type": "string"},
    }
    for name in ("response", "rejected"):
        if name not in RESPONSES[header.task]:
            del columns[f"{name}_ids"]
    if not header.verifier_choices:
        del columns["verifier"]
    if not header.columns:
        del columns["extra"]
    return columns if header.images is None else columns | SCHEMA


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
        header, header_size_bytes = _read_headers(path)
        _check_index(path, header)
        verify_checksums(path, index_path(path), header_size_bytes)
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
    header, header_size_bytes = _read_headers(path)
    return header, read_checksum(path, header_size_bytes)


def _read_headers(path: Path) -> tuple[PromptFileHeader, int]:
    """Return our header, and the size in bytes of the page that holds it, without MindSpore.

    A MindRecord file starts with the length of its own header (uint64, little endian) and the header
    (JSON), which holds our description, the page size and the table of pages.

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
            (length,) = struct.unpack("<Q", file.read(8))
            layout = json.loads(file.read(length)) if length <= min(size_bytes, MAX_HEADER_BYTES) else None
            description = json.loads(layout["schema"][0]["desc"])
            is_ours = description.pop("format") == FORMAT
            end_bytes = max(_page_ends(layout))
            header_size_bytes = int(layout["header_size"])
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
    kinds = {known.name: known.type for known in fields(PromptFileHeader)}
    for name in ("verifier_choices", "columns"):
        found = description.get(name, [])
        description[name] = tuple(found) if isinstance(found, list) else found
        kinds[name] = tuple
    description["images"] = _parsed_images(path, description.get("images"))
    description = {"template_options": {}, "template_source": "", "look": {}, **description}
    if description.keys() != kinds.keys():
        raise UserError(f"{path} has an incomplete header: build it again")
    for name, kind in kinds.items():
        if not isinstance(description[name], kind):
            raise UserError(f"{path} has a damaged header ({name} is {description[name]!r}): build it again")
    return PromptFileHeader(**description), header_size_bytes


def _parsed_images(path: Path, value: object) -> ImageHeader | None:
    try:
        return None if value is None else parse_image_header(value)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} has a damaged header (images: {error}): build it again") from error


def _page_ends(layout: dict) -> Iterator[int]:
    """Yield where the used part of each page ends, in bytes from the start of the file."""
    for page in layout["page"]:
        yield layout["header_size"] + page["page_id"] * layout["page_size"] + page["page_size"]


def _check_index(path: Path, header: PromptFileHeader) -> None:
    """Raise ``UserError`` unless the index beside ``path`` belongs to it."""
    index = index_path(path)
    if not index.is_file():
        raise UserError(f"{path} has no index {index.name}: copy it along, or build the file again")
    try:
        with _open_index(path) as database:
            ((name,),) = database.execute("SELECT NAME FROM SHARD_NAME")
            ((num_records,),) = database.execute("SELECT COUNT(*) FROM INDEXES")
    except (sqlite3.Error, ValueError) as error:
        raise UserError(f"the index {index} is damaged ({error}): build the file again") from error
    if name != path.name:
        raise UserError(f"{path} was renamed: MindRecord needs its first name, so rename both files to {name}[.db]")
    if num_records != header.num_kept:
        raise UserError(f"the index {index} has {num_records} records, the file {header.num_kept}: build it again")


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
