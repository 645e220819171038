"""The work of one data worker: raw records to token ids, a chunk at a time.

Worker processes import this module, so it stays free of MindSpore, which costs seconds and 400 MB each.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.control_tokens import control_token_pattern, holds_control_token, neutralised, neutralised_value
from mindrlhf.data.handlers import ROLES, Example, RecordError, Row, load_handler, read_columns, with_source
from mindrlhf.data.left_out import left_out, row_variables
from mindrlhf.data.mindrecord import RESPONSES, Prompt
from mindrlhf.data.pictures.reader import Picture, PictureReader
from mindrlhf.data.readers import BadRecord, RawRecord, limited_memory
from mindrlhf.data.templates import load_template, record_options, response_end_id
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.sandbox.code_tests.unit_tests import UnitTests


@dataclass(frozen=True)
class EncoderSettings:
    """All that decides how a record becomes ids; plain values, so that it can be sent to a worker.

    Attributes:
        source_names: the name of each input file (key: its path as text) in source ids.
        merges_path: see ``load_tokenizer``.
        handler, key_map: see ``load_handler``.
        template, system, template_options: see ``load_template``.
        task: "prompts"; or "sft" to store a response too, "preference" two, end token appended.
        max_prompt_length, max_length: in tokens, the latter of prompt and longer response with its end token; None for
            task "prompts".
        keep_control_tokens: let ``<|im_end|>`` in the data become that token; else it is written apart.
        min_pixels, max_pixels, image_root: see ``PictureReader``.
        columns: kept for rewards, tools and environments, name -> key of the raw record; see ``parse_columns``.
        allow_own_helpers: see ``code_execution``.
    """

    tokenizer_path: str | Path
    source_names: Mapping[str, str]
    merges_path: str | Path | None = None
    handler: str = "gsm8k"
    key_map: Mapping[str, str] = field(default_factory=dict)
    template: str = "chat"
    system: str | None = None
    task: str = "prompts"
    max_prompt_length: int = 1024
    max_length: int | None = None
    keep_control_tokens: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    image_root: str | Path | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    allow_own_helpers: bool = False


@dataclass(frozen=True)
class _Prepared:
    """A record before its texts become ids."""

    example: Example
    prompt: str
    pictures: tuple[Picture, ...]
    extra: dict[str, Any]  # kept columns


@dataclass
class EncodedChunk:
    """Encoded records of one chunk in their order, and counts."""

    records: list[Prompt] = field(default_factory=list)
    image_tokens: list[tuple[int, ...]] = field(default_factory=list)  # of each image of each record
    bad_records: list[BadRecord] = field(default_factory=list)
    num_read: int = 0
    num_too_long: int = 0
    num_with_control_tokens: int = 0  # of all usable records, too long or not
    # Of all usable records: columns that went nowhere, what their prompts lack, how values were read.
    unread: Counter[str] = field(default_factory=Counter)
    unrendered: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def digests(self) -> np.ndarray:
        """Return uint64 ``[records, 3]``: of the prompt, of the answer, of all that a run reads but the source."""
        rows = [_digests(record) for record in self.records]
        return np.array(rows, dtype=np.uint64).reshape(-1, 3)

    def without(self, dropped: Sequence[bool]) -> "EncodedChunk":
        """Return the chunk without some of its records; the counts stay."""
        kept = [index for index, is_dropped in enumerate(dropped) if not is_dropped]
        lists = {name: [getattr(self, name)[index] for index in kept] for name in ("records", "image_tokens")}
        return replace(self, **lists)

    def lengths(self) -> np.ndarray:
        """Return int64 ``[records, 2]``: lengths of the prompt and of the longer response, in tokens."""
        pairs = [
            (len(record.prompt_ids), max(len(record.response_ids), len(record.rejected_ids))) for record in self.records
        ]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


class RecordEncoder:
    """Turns raw records into ids.

    Raises:
        UserError: on construction, when the settings name something that is absent or does not fit.
    """

    def __init__(self, settings: EncoderSettings):
        self._settings = settings
        self._handler = load_handler(settings.handler, settings.key_map)
        self.tokenizer = load_tokenizer(settings.tokenizer_path, settings.merges_path)
        self.template = load_template(settings.template, self.tokenizer, settings.system, settings.template_options)
        self.pictures = PictureReader(
            settings.tokenizer_path, self.tokenizer, settings.min_pixels, settings.max_pixels, settings.image_root
        )
        self._control_tokens = control_token_pattern(self.tokenizer.control_tokens)
        self._response_fields = RESPONSES[settings.task]
        self._end_id = response_end_id(self.template, self.tokenizer) if self._response_fields else None
        ends = (self.tokenizer.decode([one], skip_special_tokens=False) for one in self.tokenizer.eos_token_ids)
        self._ends = tuple(end for end in ends if end in self.tokenizer.control_tokens)

    def encode(self, raw_records: Sequence[RawRecord | BadRecord]) -> EncodedChunk:
        chunk = EncodedChunk(num_read=len(raw_records))
        prepared: list[_Prepared] = []
        for raw in raw_records:
            try:
                prepared.append(self._prepare(raw, chunk))
            except RecordError as error:
                chunk.bad_records.append(BadRecord(raw.path, raw.number, str(error)))
        all_prompt_ids = self.tokenizer.encode_batch([record.prompt for record in prepared])
        examples = [record.example for record in prepared]
        response_ids, rejected_ids = (self._encode_responses(examples, name) for name in ("response", "rejected"))
        for record, prompt_ids, response, rejected in zip(prepared, all_prompt_ids, response_ids, rejected_ids):
            prompt_ids = self.pictures.expand(prompt_ids, record.pictures)
            if not self._fits(len(prompt_ids), max(len(response), len(rejected))):
                chunk.num_too_long += 1
                continue
            chunk.records.append(
                Prompt(
                    np.array(prompt_ids, np.int32),
                    np.array(response, np.int32),
                    record.example.answer,
                    record.example.source_id,
                    np.array(rejected, np.int32),
                    record.example.verifier,
                    tuple(picture.file for picture in record.pictures),
                    record.extra,
                )
            )
            chunk.image_tokens.append(tuple(picture.num_tokens for picture in record.pictures))
        return chunk

    def _encode_responses(self, examples: Sequence[Example], name: str) -> list[list[int]]:
        """Return the ids of one field of every example, end token appended; empty lists when the task has no such."""
        if name not in self._response_fields:
            return [[] for _ in examples]
        texts = [getattr(example, name) for example in examples]
        return [[*ids, self._end_id] for ids in self.tokenizer.encode_batch(texts)]

    def _prepare(self, raw: RawRecord | BadRecord, chunk: EncodedChunk) -> _Prepared:
        """Return the example, the prompt and the images of a record, and count in ``chunk`` what of it goes nowhere;
        ids come later, for many prompts at once.

        Raises:
            RecordError: what is wrong with it.
        """
        if isinstance(raw, BadRecord):
            raise RecordError(raw.reason)
        row = Row(raw.fields)
        example = with_source(self._handler(row), f"{self._settings.source_names[str(raw.path)]}:{raw.number}")
        example = replace(example, **{name: self._without_end(example, name) for name in self._response_fields})
        self._check_example(example, raw.fields)
        options = {**row_variables(row, self.template), **record_options(row)}
        has_control_tokens, pattern = False, self._control_tokens
        if pattern is not None:
            options_apart = neutralised_value(options, pattern)
            has_control_tokens = holds_control_token(example, pattern) or options_apart != options
            if has_control_tokens and not self._settings.keep_control_tokens:
                example, options = neutralised(example, pattern), options_apart
        with limited_memory():  # a template's loops can add up to any length
            prompt = self.template.render(example, options)
        for text in (prompt, example.answer, example.response or "", example.rejected or ""):
            _check_storable(text)
        sources = [source for message in example.messages for source in message.images]
        pictures = tuple(self.pictures.read(sources, raw.path))
        self.pictures.check_prompt(prompt, len(pictures))
        extra = read_columns(row, self._settings.columns)
        chunk.num_with_control_tokens += has_control_tokens
        chunk.unread.update(row.unread())
        chunk.unrendered.update(left_out(self.template, example, options, prompt))
        unknown = {message.role for message in example.messages} - set(ROLES)
        notes = [*row.notes, *(f"messages from {role!r}, which is no usual role" for role in sorted(unknown))]
        chunk.notes.update(set(notes))
        return _Prepared(example, prompt, pictures, extra)

    def _without_end(self, example: Example, name: str) -> str | None:
        """Return a response without the end tokens that the data set wrote behind it: it gets its own."""
        text = getattr(example, name) or ""
        while self._ends and text.rstrip().endswith(self._ends):
            text = text.rstrip()
            text = text[: -max(len(end) for end in self._ends if text.endswith(end))]
            if not text.strip():
                raise RecordError(f"the {name} is an end token alone")
        return text or None

    def _check_example(self, example: Example, fields: Mapping) -> None:
        for name in self._response_fields:
            if getattr(example, name) is None:
                raise RecordError(
                    f"no {name} to train on: handler map_keys takes one, {name}=KEY, and handler trl reads messages, "
                    "prompt and completion, or chosen and rejected"
                )
        if not self._response_fields:
            _check_unit_tests(example, self._settings.allow_own_helpers)
        if "rejected" in self._response_fields and example.response == example.rejected:
            raise RecordError("the preferred and the rejected response are the same text")
        if not any(message.images for message in example.messages):
            _check_no_images(fields, self._settings.handler)

    def _fits(self, prompt_length: int, response_length: int) -> bool:
        max_length = self._settings.max_length
        fits_row = max_length is None or prompt_length + response_length <= max_length
        return fits_row and prompt_length <= self._settings.max_prompt_length


def _digests(record: Prompt) -> tuple[int, int, int]:
    prompt = [record.prompt_ids.tobytes(), *record.image_files]
    rest = (record.verifier, json.dumps(record.extra, sort_keys=True))
    whole = [*prompt, record.response_ids.tobytes(), record.rejected_ids.tobytes(), record.answer.encode()]
    return _digest(prompt), _digest([record.answer.encode()]), _digest([*whole, *(text.encode() for text in rest)])


def _digest(parts: Sequence[bytes]) -> int:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return int.from_bytes(found.digest(), "little")


def _check_unit_tests(example: Example, allow_own_helpers: bool) -> None:
    """Refuse unit tests that the verifier would refuse, here instead of at every sample of a run."""
    try:
        UnitTests.check_record(example.answer, example.verifier, allow_own_helpers)
    except ValueError as error:
        raise RecordError(f"the answer: {error}") from error


def _check_no_images(fields: Mapping, handler: str) -> None:
    """Refuse images that the handler does not read: a question about what nobody sees is no problem to train on."""
    for key in ("image", "images"):
        if fields.get(key):
            raise RecordError(
                f"field {key!r} holds images that handler {handler!r} does not read: choose verl, geo3k or map_keys "
                f"with images={key}"
            )


def _check_storable(text: str) -> None:
    """JSON escapes can spell what UTF-8 cannot hold, and MindRecord loses trailing NULs."""
    if "\0" in text:
        raise RecordError("text holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"text holds half of a surrogate pair at character {error.start}") from error
