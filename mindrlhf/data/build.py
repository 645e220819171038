"""Build a prompt file: read, encode in parallel, write MindRecord."""

import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from os.path import commonpath, relpath
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mindrlhf.data.encoding import EncodedChunk, EncoderSettings, RecordEncoder
from mindrlhf.data.handlers import load_handler, read_verl
from mindrlhf.data.look import BuildTotals
from mindrlhf.data.mindrecord import (
    TASKS,
    Prompt,
    PromptFileHeader,
    check_output_path,
    columns,
    index_path,
    write_prompt_file,
)
from mindrlhf.data.pictures.columns import ImageHeader
from mindrlhf.data.readers import BadRecord, RawRecord, check_readable, read_records
from mindrlhf.data.workers import default_num_workers, encode_in_order
from mindrlhf.errors import UserError

CHUNK_RECORDS, CHUNK_BYTES = 128, 64 << 20


@dataclass(frozen=True)
class BuildReport:
    """Result of a build. ``bad_examples`` are the first few bad records, as ``file:number: reason``."""

    path: Path
    header: PromptFileHeader
    begin: str  # which token the prompts begin with, in words
    num_with_control_tokens: int  # records whose texts hold control tokens, written apart unless they were to be kept
    bad_examples: tuple[str, ...]
    elapsed_s: float


def build_prompts(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer_path: str | Path,
    *,
    num_workers: int | None = None,
    skip_bad: bool = False,
    deduplicate: bool = False,
    **settings: Any,
) -> BuildReport:
    """Build the prompt file ``output`` from raw data files; the records keep the order of the inputs.

    Args:
        inputs, output: JSONL, JSON or Parquet files; the MindRecord file, replaced when it exists.
        tokenizer_path: see ``load_tokenizer``.
        num_workers: processes that encode; 1 stays in this process, None takes up to one per core.
        skip_bad, deduplicate: leave out and count what cannot be used, what equals an earlier record for a run.
        settings: fields of ``EncoderSettings``.

    Raises:
        UserError: a setting, data or a disk that refuses, or no record left; RunFailure: a worker process died.
    """
    started_s = time.monotonic()
    inputs, output = [Path(path) for path in inputs], Path(output)
    settings = EncoderSettings(tokenizer_path, source_names=_source_names(inputs), **settings)
    totals = BuildTotals(deduplicate)
    _check_paths(inputs, output)
    _check_task(settings.task, settings.max_length)
    settings = _with_structured_truths(settings, inputs)
    input_size_bytes = sum(path.stat().st_size for path in inputs)
    if num_workers is None:
        num_workers = default_num_workers(input_size_bytes)
    encoder = RecordEncoder(settings)
    schema = columns(
        settings.task,
        verifier="verifier" in settings.key_map,
        extra=bool(settings.columns),
        images=encoder.pictures.processor is not None,
    )
    with _one_line_for_disks(output), _progress_bar(input_size_bytes) as bar:
        encoded = encode_in_order(encoder, settings, _chunks(inputs, bar), num_workers)
        # Closing the generator ends the worker processes, also when a bad record ends the build.
        with closing(encoded):
            batches = _kept(encoded, totals, skip_bad)
            header = write_prompt_file(output, schema, batches, lambda: _header(settings, encoder, totals))
    return BuildReport(
        path=output,
        header=header,
        begin=_begin(encoder, totals),
        num_with_control_tokens=totals.num_with_control_tokens,
        bad_examples=tuple(totals.bad_examples),
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
    check_output_path(output)
    for path in inputs:
        check_readable(path)
        if path.resolve() in (output.resolve(), index_path(output).resolve()):
            raise UserError(f"output {output} would overwrite input {path}")
    if len({path.resolve() for path in inputs}) < len(inputs):
        raise UserError("the same input file is named twice; its records would count twice")
    if importlib.util.find_spec("mindspore") is None:
        raise UserError("writing MindRecord needs MindSpore, which is not installed: see 'mindrlhf doctor'")


def _check_task(task: str, max_length: int | None) -> None:
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    if task == "prompts" and max_length is not None:
        raise UserError("max_length bounds prompt + response, which task prompts lacks: give --max-prompt-length alone")
    if task != "prompts" and max_length is None:
        raise UserError(f"task {task} needs max_length: give --max-length, the most tokens of prompt + response")


def _source_names(inputs: Sequence[Path]) -> dict[str, str]:
    """Name each input as briefly as tells them apart: file name, else the path below the common folder."""
    names = {str(path): path.name for path in inputs}
    if len(set(names.values())) < len(names):
        root = commonpath([path.resolve().parent for path in inputs])
        names = {str(path): relpath(path.resolve(), root) for path in inputs}
    return names


def _progress_bar(size_bytes: int) -> tqdm:
    """Return a bar that is drawn on terminals only."""
    return tqdm(total=size_bytes, unit="B", unit_scale=True, desc="encode", file=sys.stderr, disable=None)


def _with_structured_truths(settings: EncoderSettings, inputs: Sequence[Path]) -> EncoderSettings:
    """Keep verl's ground truths as a column, too, where they are no texts: its reward functions read what they are."""
    takes_truths = settings.task == "prompts" and load_handler(settings.handler, settings.key_map) is read_verl
    if takes_truths and "ground_truth" not in settings.columns:
        for record in islice(read_records(inputs[0]), CHUNK_RECORDS):
            truth = getattr(record, "fields", {}).get("reward_model")
            truth = truth.get("ground_truth") if isinstance(truth, dict) else None
            if isinstance(truth, (list, dict, int, float)):
                return replace(settings, columns={**settings.columns, "ground_truth": "reward_model.ground_truth"})
    return settings


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


def _kept(chunks: Iterable[EncodedChunk], totals: BuildTotals, skip_bad: bool) -> Iterator[list[Prompt]]:
    for chunk in chunks:
        if chunk.bad_records and not skip_bad:
            hint = " (--skip-bad counts such records and goes on)" if chunk.records else ""
            raise UserError(f"{chunk.bad_records[0]}{hint}")
        yield totals.add(chunk).records


def _check_any_kept(totals: BuildTotals, settings: EncoderSettings) -> None:
    if totals.num_kept:
        if "images" in settings.key_map and not totals.num_images:
            raise UserError(
                f"no record has images in {settings.key_map['images']!r}: mend the key, or leave images out"
            )
        empty = [key for name, key in settings.columns.items() if name not in totals.filled_columns]
        if empty:
            raise UserError(f"no record has a value in {empty[0]!r}, which is kept: mend the key, or leave it out")
        return
    limit = f"{settings.max_prompt_length} tokens" + (f" ({settings.max_length} in all)" if settings.max_length else "")
    first_bad = f", the first: {totals.bad_examples[0]}" if totals.bad_examples else ""
    raise UserError(
        f"no record is left of {totals.num_read}: {totals.num_too_long} longer than {limit}, "
        f"{totals.num_bad} bad{first_bad}{'; raise --max-prompt-length' if totals.num_too_long else ''}"
    )


def _header(settings: EncoderSettings, encoder: RecordEncoder, totals: BuildTotals) -> PromptFileHeader:
    _check_any_kept(totals, settings)
    return PromptFileHeader(
        task=settings.task,
        tokenizer_fingerprint=encoder.tokenizer.fingerprint,
        template=encoder.template.name,
        template_sha256=encoder.template.sha256,
        handler=settings.handler,
        num_read=totals.num_read,
        num_kept=totals.num_kept,
        num_bad=totals.num_bad,
        num_too_long=totals.num_too_long,
        max_prompt_length=settings.max_prompt_length,
        max_length=settings.max_length,
        longest_prompt=max(totals.lengths[0]),
        longest_response=max(totals.lengths[1]),
        verifier_choices=tuple(sorted(totals.choices)) if any(totals.choices) else (),
        images=_image_header(encoder, totals),
        template_options=encoder.template.options,
        template_source=encoder.template.kept_source,
        columns=tuple(settings.columns),
        look=totals.look(settings.task),
    )


def _begin(encoder: RecordEncoder, totals: BuildTotals) -> str:
    """Say whether prompts have the beginning-of-text token, and whether the tokenizer would put it there."""
    tokenizer = encoder.tokenizer
    token = tokenizer.bos_prefix or tokenizer.bos_token or ""
    ids = tokenizer.encode(token)
    if not ids:
        return "no token: the tokenizer has none"
    if totals.first_prompt[: len(ids)].tolist() == ids:
        return f"{token!r} ({', '.join(map(str, ids))}), once"
    adds = "would put it before a text" if tokenizer.bos_prefix else "puts none before a text"
    return f"no token: the template writes no {token!r}, and the tokenizer {adds}"


def _image_header(encoder: RecordEncoder, totals: BuildTotals) -> ImageHeader | None:
    if not totals.num_images:
        return None
    processor = encoder.pictures.processor
    return ImageHeader(
        num_images=totals.num_images,
        num_records=totals.num_with_images,
        most_images=totals.most_images,
        most_tokens=totals.most_image_tokens,
        image_token=encoder.pictures.token_id,
        limits=processor.limits,
        geometry=processor.geometry,
    )
