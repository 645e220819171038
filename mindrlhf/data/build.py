"""Build a prompt file: read, encode in parallel, spool, then write MindRecord with the final counts."""

import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from os.path import commonpath, relpath
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from tqdm import tqdm

from mindrlhf.data.encoding import EncodedChunk, EncoderSettings, RecordEncoder
from mindrlhf.data.look import DataLook, Repeats, count_bounded, described, quantiles
from mindrlhf.data.mindrecord import (
    RESPONSES,
    TASKS,
    Prompt,
    PromptFileHeader,
    check_output_path,
    index_path,
    write_prompt_file,
)
from mindrlhf.data.pictures.columns import ImageHeader
from mindrlhf.data.readers import BadRecord, RawRecord, check_readable, read_records
from mindrlhf.data.workers import default_num_workers, encode_in_order
from mindrlhf.errors import UserError
from mindrlhf.system.files import scratch_directory

CHUNK_RECORDS, CHUNK_BYTES = 128, 64 << 20
NUM_REPORTED_BAD = 5
MAX_CHOICES = 100
MAX_SHOWN_ANSWER = 40  # characters

SPOOL_SCHEMA = pyarrow.schema(
    {
        "prompt_ids": pyarrow.list_(pyarrow.int32()),
        "response_ids": pyarrow.list_(pyarrow.int32()),
        "answer": pyarrow.string(),
        "source_id": pyarrow.string(),
        "rejected_ids": pyarrow.list_(pyarrow.int32()),
        "verifier": pyarrow.string(),
        "image_files": pyarrow.list_(pyarrow.binary()),
        "extra": pyarrow.string(),
    }
)


@dataclass(frozen=True)
class LengthSummary:
    """Shortest, mean and longest, in tokens."""

    shortest: int
    mean: float
    longest: int

    def __str__(self) -> str:
        return f"min {self.shortest}, mean {self.mean:.1f}, max {self.longest} tokens"


@dataclass(frozen=True)
class BuildReport:
    """What a build did. ``bad_examples`` are the first few bad records, as ``file:number: reason``."""

    path: Path
    header: PromptFileHeader
    prompt_lengths: LengthSummary
    response_lengths: LengthSummary | None  # of pairs, the longer one; None for task prompts
    num_with_control_tokens: int  # records whose texts hold control tokens, written apart unless they were to be kept
    bad_examples: tuple[str, ...]
    elapsed_s: float


@dataclass
class _Tally:
    """Running totals of a build."""

    num_read: int = 0
    num_bad: int = 0
    num_too_long: int = 0
    num_with_control_tokens: int = 0
    bad_examples: list[str] = field(default_factory=list)
    lengths: list[Counter] = field(default_factory=lambda: [Counter(), Counter()])  # of prompts, of responses
    choices: set[str] = field(default_factory=set)  # of verifiers
    found_columns: set[str] = field(default_factory=set)  # kept ones that are not null everywhere
    num_images: int = 0
    num_with_images: int = 0
    most_images: int = 0  # of one record
    most_image_tokens: int = 0  # of one image
    bad_reasons: Counter[str] = field(default_factory=Counter)
    look: DataLook = field(default_factory=DataLook)

    def add(self, chunk: EncodedChunk) -> EncodedChunk:
        """Count a chunk; return it with the records that are kept."""
        chunk = self.look.add(chunk)
        self.num_read += chunk.num_read
        self.num_bad += len(chunk.bad_records)
        self.num_too_long += chunk.num_too_long
        self.num_with_control_tokens += chunk.num_with_control_tokens
        num_wanted = NUM_REPORTED_BAD - len(self.bad_examples)
        self.bad_examples += [str(bad) for bad in chunk.bad_records[:num_wanted]]
        count_bounded(self.bad_reasons, Counter(bad.reason for bad in chunk.bad_records))
        for counter, lengths in zip(self.lengths, chunk.lengths().T):
            counter.update(lengths.tolist())
        self._add_images(chunk.image_tokens)
        for record in chunk.records:
            self.found_columns.update(name for name, value in record.extra.items() if value is not None)
        self.choices.update(record.verifier for record in chunk.records)
        if len(self.choices) > MAX_CHOICES:
            raise UserError(
                f"the records choose verifiers in over {MAX_CHOICES} ways: is 'verifier' mapped to another key?"
            )
        return chunk

    def _add_images(self, image_tokens: Sequence[tuple[int, ...]]) -> None:
        for own in filter(None, image_tokens):
            self.num_images += len(own)
            self.num_with_images += 1
            self.most_images = max(self.most_images, len(own))
            self.most_image_tokens = max(self.most_image_tokens, *own)

    @property
    def num_kept(self) -> int:
        return self.num_read - self.num_bad - self.num_too_long - self.look.num_dropped

    def summary(self, column: int) -> LengthSummary:
        counter = self.lengths[column]
        total = sum(length * count for length, count in counter.items())
        return LengthSummary(min(counter), total / counter.total(), max(counter))


def build_prompts(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer_path: str | Path,
    *,
    merges_path: str | Path | None = None,
    handler: str = "gsm8k",
    key_map: Mapping[str, str] | None = None,
    template: str = "chat",
    system: str | None = None,
    task: str = "prompts",
    max_prompt_length: int = 1024,
    max_length: int | None = None,
    num_workers: int | None = None,
    skip_bad: bool = False,
    keep_control_tokens: bool = False,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    image_root: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    show_progress: bool = True,
    template_options: Mapping[str, Any] | None = None,
    deduplicate: bool = False,
) -> BuildReport:
    """Build the prompt file ``output`` from raw data files; the records keep the order of the inputs.

    Args:
        inputs, output: JSONL, JSON or Parquet files; the MindRecord file, replaced when it exists.
        tokenizer_path, handler, template and what belongs to them: see ``load_tokenizer``, ``load_handler``,
            ``load_template``; image_root, pixels: see ``PictureReader``.
        task: "prompts"; or "sft" to store a response too, "preference" two, end token appended; max_prompt_length,
            max_length: in tokens, the latter of prompt and longer response with its end token.
        num_workers: processes that encode; 1 stays in this process, None takes up to one per core.
        skip_bad, deduplicate: leave out and count what cannot be used, what equals an earlier record for a run.
        keep_control_tokens: let ``<|im_end|>`` in the data become that token; else it is written apart.
        columns: kept for rewards, tools and environments, name -> key of the raw record; see ``parse_columns``.

    Raises:
        UserError: a setting, data or a disk that refuses, or no record left; RunFailure: a worker process died.
    """
    inputs = [Path(path) for path in inputs]
    settings = EncoderSettings(
        tokenizer_path=str(tokenizer_path),
        merges_path=merges_path and str(merges_path),
        handler=handler,
        key_map=dict(key_map or {}),
        template=template,
        system=system,
        task=task,
        max_prompt_length=max_prompt_length,
        max_length=max_length,
        source_names=_source_names(inputs),
        keep_control_tokens=keep_control_tokens,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        image_root=image_root and str(image_root),
        template_options=template_options or {},
        columns=columns or {},
    )
    return _build(inputs, Path(output), settings, DataLook(deduplicate), num_workers, skip_bad, show_progress)


def _build(
    inputs: Sequence[Path],
    output: Path,
    settings: EncoderSettings,
    look: DataLook,
    num_workers: int | None,
    skip_bad: bool,
    show_progress: bool,
) -> BuildReport:
    started_s = time.monotonic()
    _check_paths(inputs, output)
    _check_numbers(settings.task, settings.max_prompt_length, settings.max_length, num_workers)
    input_size_bytes = sum(path.stat().st_size for path in inputs)
    if num_workers is None:
        num_workers = default_num_workers(input_size_bytes)
    encoder = RecordEncoder(settings)
    tally = _Tally(look=look)
    with _one_line_for_disks(output), scratch_directory(output.parent, ".mindrlhf-build-") as directory:
        spool = directory / "records.arrow"
        with _progress_bar(input_size_bytes, show_progress) as bar:
            encoded = encode_in_order(encoder, settings, _chunks(inputs, bar), num_workers)
            # Closing the generator ends the worker processes, also when a bad record ends the build.
            with closing(encoded), pyarrow.OSFile(str(spool), "wb") as sink:
                _spool(_counted(encoded, tally, skip_bad), sink)
        _check_any_kept(tally, settings)
        header = _header(settings, encoder, tally, _look(settings, tally, spool))
        write_prompt_file(output, header, _read_spool(spool))
    return BuildReport(
        path=output,
        header=header,
        prompt_lengths=tally.summary(0),
        response_lengths=tally.summary(1) if RESPONSES[settings.task] else None,
        num_with_control_tokens=tally.num_with_control_tokens,
        bad_examples=tuple(tally.bad_examples),
        elapsed_s=time.monotonic() - started_s,
    )


@contextmanager
def _one_line_for_disks(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Arrow puts words of its own around the system's.
        reason = os.strerror(error.errno) if error.errno else error
        raise UserError(
            f"{output} cannot be written ({reason}): make room, or choose an output on another disk"
        ) from error


def _check_paths(inputs: Sequence[Path], output: Path) -> None:
    if not inputs:
        raise UserError("no input files")
    for path in inputs:
        check_readable(path)
        if path.resolve() in (output.resolve(), index_path(output).resolve()):
            raise UserError(f"output {output} would overwrite input {path}")
    if len({path.resolve() for path in inputs}) < len(inputs):
        raise UserError("the same input file is named twice; its records would count twice")
    check_output_path(output)
    if importlib.util.find_spec("mindspore") is None:
        raise UserError("writing MindRecord needs MindSpore, which is not installed: see 'mindrlhf doctor'")


def _check_numbers(task: str, max_prompt_length: int, max_length: int | None, num_workers: int | None) -> None:
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    if max_prompt_length < 1:
        raise UserError(f"max_prompt_length must be 1 or more, got {max_prompt_length}")
    if num_workers is not None and num_workers < 1:
        raise UserError(f"the number of workers must be 1 or more, got {num_workers}")
    if task == "prompts" and max_length is not None:
        raise UserError("max_length bounds prompt + response, which task prompts lacks: give --max-prompt-length alone")
    if task != "prompts" and max_length is None:
        raise UserError(f"task {task} needs max_length: give --max-length, the most tokens of prompt + response")
    if max_length is not None and max_length < 2:
        raise UserError(f"max_length must be 2 or more, got {max_length}")


def _source_names(inputs: Sequence[Path]) -> dict[str, str]:
    """Name each input as briefly as tells them apart: file name, else the path below the common folder."""
    names = {str(path): path.name for path in inputs}
    if len(set(names.values())) < len(names):
        root = commonpath([path.resolve().parent for path in inputs])
        names = {str(path): relpath(path.resolve(), root) for path in inputs}
    return names


def _progress_bar(size_bytes: int, show_progress: bool) -> tqdm:
    disable = None if show_progress else True  # None draws on terminals only
    return tqdm(total=size_bytes, unit="B", unit_scale=True, desc="encode", file=sys.stderr, disable=disable)


def _chunks(inputs: Sequence[Path], bar: tqdm) -> Iterator[list[RawRecord | BadRecord]]:
    """Yield the records of all inputs in lists; a list never spans two files."""
    done_bytes = 0
    for path in inputs:
        records = read_records(path)
        while chunk := _next_chunk(records):
            yield chunk
            bar.update(done_bytes + chunk[-1].position_bytes - bar.n)
        done_bytes += path.stat().st_size


def _next_chunk(records: Iterator[RawRecord | BadRecord]) -> list[RawRecord | BadRecord]:
    chunk, size_bytes = [], 0
    for record in islice(records, CHUNK_RECORDS):
        chunk.append(record)
        size_bytes += getattr(record, "size_bytes", 0)
        if size_bytes > CHUNK_BYTES:
            break
    return chunk


def _counted(chunks: Iterable[EncodedChunk], tally: _Tally, skip_bad: bool) -> Iterator[EncodedChunk]:
    for chunk in chunks:
        if chunk.bad_records and not skip_bad:
            raise UserError(f"{chunk.bad_records[0]} (mend the record, or pass --skip-bad to count and leave out such)")
        yield tally.add(chunk)


def _check_any_kept(tally: _Tally, settings: EncoderSettings) -> None:
    if tally.num_kept:
        if "images" in settings.key_map and not tally.num_images:
            raise UserError(
                f"no record has images in {settings.key_map['images']!r}: mend the key, or leave images out"
            )
        empty = [key for name, key in settings.columns.items() if name not in tally.found_columns]
        if empty:
            raise UserError(f"no record has a value in {empty[0]!r}, which is kept: mend the key, or leave it out")
        return
    limit = f"{settings.max_prompt_length} tokens" + (f" ({settings.max_length} in all)" if settings.max_length else "")
    first_bad = f", the first: {tally.bad_examples[0]}" if tally.bad_examples else ""
    raise UserError(
        f"no record is left of {tally.num_read}: {tally.num_too_long} longer than {limit}, "
        f"{tally.num_bad} bad{first_bad}"
    )


def _look(settings: EncoderSettings, tally: _Tally, spool: Path) -> dict[str, Any]:
    """Return what stands out in the data as a whole, as JSON values: what is 0 is left out.

    Keys: ``deduplicated`` (records left out), ``duplicates`` (records that equal an earlier one), ``repeated`` (prompts
    that stand more than once, the records they stand in, how often the most frequent does and where it comes first),
    ``contradictory`` (prompts with different answers, and two such records), ``without_answer``, or ``no_answers``
    where all lack one; by name how many records have it: ``unread`` (columns that nothing read), ``template`` (what
    stands in no prompt), ``notes`` (how values were read), ``bad`` (reasons); ``prompt_tokens`` and
    ``response_tokens`` (quantiles).
    """
    look, repeats = tally.look, tally.look.repeats()
    num_without = look.num_without_answer if settings.task == "prompts" else 0
    has_answers = num_without < tally.num_kept
    repeated = {"prompts": repeats.num_prompts, "records": repeats.num_records, "most": repeats.most}
    places = _source_ids(spool, [repeats.most_at, *repeats.contradiction]) if repeats.num_prompts else {}
    values = {
        "deduplicated": look.num_dropped,
        "duplicates": repeats.num_duplicates,
        "repeated": repeated | {"first": places[repeats.most_at][0]} if repeats.num_prompts else {},
        "contradictory": _contradiction(repeats, places),
        "without_answer": num_without if has_answers else 0,
        "no_answers": 0 if has_answers else num_without,
        "unread": look.unread,
        "template": look.unrendered,
        "notes": look.notes,
        "bad": tally.bad_reasons,
        "prompt_tokens": quantiles(tally.lengths[0]),
        "response_tokens": quantiles(tally.lengths[1]) if RESPONSES[settings.task] else {},
    }
    return described(values.items())


def _contradiction(repeats: Repeats, places: Mapping[int, tuple[str, str]]) -> dict[str, Any]:
    if not repeats.num_contradictory:
        return {}
    examples = [
        f"{source} says {answer[:MAX_SHOWN_ANSWER]!r}" for source, answer in map(places.get, repeats.contradiction)
    ]
    return {"prompts": repeats.num_contradictory, "example": ", ".join(examples)}


def _source_ids(spool: Path, places: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Return source and answer of the records at some places of the spool."""
    found, start = {}, 0
    with pyarrow.memory_map(str(spool)) as source, pyarrow.ipc.open_stream(source) as reader:
        for batch in reader:
            for place in places:
                if start <= place < start + len(batch):
                    row = place - start
                    found[place] = (batch["source_id"][row].as_py(), batch["answer"][row].as_py())
            start += len(batch)
    return found


def _header(settings: EncoderSettings, encoder: RecordEncoder, tally: _Tally, look: dict[str, Any]) -> PromptFileHeader:
    return PromptFileHeader(
        task=settings.task,
        tokenizer_fingerprint=encoder.tokenizer.fingerprint,
        template=encoder.template.name,
        template_sha256=encoder.template.sha256,
        handler=settings.handler,
        num_read=tally.num_read,
        num_kept=tally.num_kept,
        num_bad=tally.num_bad,
        num_too_long=tally.num_too_long,
        max_prompt_length=settings.max_prompt_length,
        max_length=settings.max_length,
        longest_prompt=tally.summary(0).longest,
        longest_response=tally.summary(1).longest,
        verifier_choices=tuple(sorted(tally.choices)) if any(tally.choices) else (),
        images=_image_header(encoder, tally),
        template_options=encoder.template.options,
        template_source=encoder.template.kept_source,
        columns=tuple(settings.columns),
        look=look,
    )


def _image_header(encoder: RecordEncoder, tally: _Tally) -> ImageHeader | None:
    if not tally.num_images:
        return None
    processor = encoder.pictures.processor
    return ImageHeader(
        num_images=tally.num_images,
        num_records=tally.num_with_images,
        most_images=tally.most_images,
        most_tokens=tally.most_image_tokens,
        image_token=encoder.pictures.token_id,
        limits=processor.limits,
        geometry=processor.geometry,
    )


def _spool(chunks: Iterable[EncodedChunk], sink: pyarrow.NativeFile) -> None:
    """Keep the ids on disk until the counts are known, which MindRecord wants first."""
    with pyarrow.ipc.new_stream(sink, SPOOL_SCHEMA) as writer:
        for chunk in chunks:
            rows = [vars(record) | {"extra": json.dumps(record.extra)} for record in chunk.records]
            writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=SPOOL_SCHEMA))


def _read_spool(spool: Path) -> Iterator[list[Prompt]]:
    with pyarrow.memory_map(str(spool)) as source, pyarrow.ipc.open_stream(source) as reader:
        for batch in reader:
            columns = {name: batch[name].to_pylist() for name in ("answer", "source_id", "verifier")}
            columns |= {name: _id_arrays(batch[name]) for name in ("prompt_ids", "response_ids", "rejected_ids")}
            columns["image_files"] = map(tuple, batch["image_files"].to_pylist())
            columns["extra"] = map(json.loads, batch["extra"].to_pylist())
            yield [Prompt(**dict(zip(columns, values))) for values in zip(*columns.values(), strict=True)]


def _id_arrays(column: pyarrow.ListArray) -> Iterator[np.ndarray]:
    """Yield int32 ``[length]`` for each row of a list column."""
    ids, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return (ids[start:end] for start, end in zip(offsets[:-1], offsets[1:]))
