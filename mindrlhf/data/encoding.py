"""The work of one data worker: raw records to token ids, a chunk at a time.

Worker processes import this module, so it stays free of MindSpore, which costs seconds and 400 MB each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindrlhf.data.control_tokens import control_token_pattern, holds_control_token, neutralised
from mindrlhf.data.handlers import Example, RecordError, load_handler, read_columns, with_source
from mindrlhf.data.mindrecord import RESPONSES, Prompt
from mindrlhf.data.pictures.reader import Picture, PictureReader
from mindrlhf.data.readers import BadRecord, RawRecord
from mindrlhf.data.templates import load_template, response_end_id
from mindrlhf.data.tokenizers import load_tokenizer


@dataclass(frozen=True)
class EncoderSettings:
    """All that decides how a record becomes ids; plain values, so that it can be sent to a worker.

    ``max_length`` bounds prompt + response for the tasks that have responses and is None for task "prompts".
    ``source_names`` gives the name of each input file (key: its path as text) in source ids. Control tokens that are
    written out in the data are written apart, unless ``keep_control_tokens``. Limits of pixels that are None are those
    of the tokenizer's directory. Image files lie below ``image_root``; None means the folder of their data file.
    ``columns`` are kept as they are, name -> key of the record.
    """

    tokenizer_path: str
    merges_path: str | None
    handler: str
    key_map: Mapping[str, str]
    template: str
    system: str | None
    task: str
    max_prompt_length: int
    max_length: int | None
    source_names: Mapping[str, str]
    keep_control_tokens: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    image_root: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Prepared:
    """A record before its texts become ids."""

    example: Example
    prompt: str
    pictures: tuple[Picture, ...]
    extra: dict[str, Any]
    has_control_tokens: bool


@dataclass
class EncodedChunk:
    """What became of the records of one chunk, in their order."""

    records: list[Prompt] = field(default_factory=list)
    image_tokens: list[tuple[int, ...]] = field(default_factory=list)  # of each image of each record
    bad_records: list[BadRecord] = field(default_factory=list)
    num_read: int = 0
    num_too_long: int = 0
    num_with_control_tokens: int = 0  # of all usable records, too long or not

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
        self.template = load_template(settings.template, self.tokenizer, settings.system)
        self.pictures = PictureReader(
            settings.tokenizer_path, self.tokenizer, settings.min_pixels, settings.max_pixels, settings.image_root
        )
        self._control_tokens = control_token_pattern(self.tokenizer.control_tokens)
        self._response_fields = RESPONSES[settings.task]
        self._end_id = response_end_id(self.template, self.tokenizer) if self._response_fields else None

    def encode(self, raw_records: Sequence[RawRecord | BadRecord]) -> EncodedChunk:
        """Return the chunk of ``raw_records``."""
        chunk = EncodedChunk(num_read=len(raw_records))
        prepared: list[_Prepared] = []
        for raw in raw_records:
            try:
                prepared.append(self._prepare(raw))
            except RecordError as error:
                chunk.bad_records.append(BadRecord(raw.path, raw.number, str(error)))
        chunk.num_with_control_tokens = sum(record.has_control_tokens for record in prepared)
        all_prompt_ids = self.tokenizer.encode_batch([record.prompt for record in prepared])
        examples = [record.example for record in prepared]
        response_ids, rejected_ids = (self._encode_responses(examples, name) for name in ("response", "rejected"))
        for record, prompt_ids, response, rejected in zip(prepared, all_prompt_ids, response_ids, rejected_ids):
            prompt_ids = self.pictures.expand(prompt_ids, record.pictures)
            if self._fits(len(prompt_ids), max(len(response), len(rejected))):
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
            else:
                chunk.num_too_long += 1
        return chunk

    def _encode_responses(self, examples: Sequence[Example], name: str) -> list[list[int]]:
        """Return the ids of one field of every example, end token appended; empty lists when the task has no such."""
        if name not in self._response_fields:
            return [[] for _ in examples]
        texts = [getattr(example, name) for example in examples]
        return [[*ids, self._end_id] for ids in self.tokenizer.encode_batch(texts)]

    def _prepare(self, raw: RawRecord | BadRecord) -> _Prepared:
        """Return the example, its prompt and its images; ids come for many prompts at once."""
        if isinstance(raw, BadRecord):
            raise RecordError(raw.reason)
        source = self._settings.source_names[str(raw.path)]
        example = with_source(self._handler(raw.fields), f"{source}:{raw.number}")
        for name in self._response_fields:
            if getattr(example, name) is None:
                raise RecordError(f"no {name} to train on; handler map_keys takes one: {name}=KEY")
        if "rejected" in self._response_fields and example.response == example.rejected:
            raise RecordError("the preferred and the rejected response are the same text")
        sources = [source for message in example.messages for source in message.images]
        if not sources:
            _check_no_images(raw.fields, self._settings.handler)
        is_controlled = self._control_tokens is not None and holds_control_token(example, self._control_tokens)
        if is_controlled and not self._settings.keep_control_tokens:
            example = neutralised(example, self._control_tokens)
        prompt = self.template.render(example)
        for text in (prompt, example.answer, example.response or "", example.rejected or ""):
            _check_storable(text)
        pictures = tuple(self.pictures.read(sources, raw.path))
        self.pictures.check_prompt(prompt, len(pictures))
        extra = read_columns(raw.fields, self._settings.columns)
        return _Prepared(example, prompt, pictures, extra, is_controlled)

    def _fits(self, prompt_length: int, response_length: int) -> bool:
        max_length = self._settings.max_length
        fits_row = max_length is None or prompt_length + response_length <= max_length
        return fits_row and prompt_length <= self._settings.max_prompt_length


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
