"""The work of one data worker: raw records to token ids, a chunk at a time.

Worker processes import this module, so it stays free of MindSpore, which costs seconds and 400 MB each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindrlhf.data.handlers import Example, RecordError, load_handler, with_source
from mindrlhf.data.readers import BadRecord, RawRecord
from mindrlhf.data.templates import load_template, response_end_id
from mindrlhf.data.tokenizers import load_tokenizer


@dataclass(frozen=True)
class EncoderSettings:
    """All that decides how a record becomes ids; plain values, so that it can be sent to a worker.

    ``max_length`` bounds prompt + response for task "sft" and is None for task "prompts".
    ``source_names`` gives the name of each input file (key: its path as text) in source ids.
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


@dataclass(frozen=True)
class EncodedRecord:
    """Ids of one kept record."""

    prompt_ids: list[int]
    response_ids: list[int]
    answer: str
    source_id: str


@dataclass
class EncodedChunk:
    """What became of the records of one chunk, in their order."""

    records: list[EncodedRecord] = field(default_factory=list)
    bad_records: list[BadRecord] = field(default_factory=list)
    num_read: int = 0
    num_too_long: int = 0

    def lengths(self) -> np.ndarray:
        """Return int64 ``[records, 2]``: prompt and response lengths in tokens."""
        pairs = [(len(record.prompt_ids), len(record.response_ids)) for record in self.records]
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
        self._end_id = response_end_id(self.template, self.tokenizer) if settings.task == "sft" else None

    def encode(self, raw_records: Sequence[RawRecord | BadRecord]) -> EncodedChunk:
        """Return the chunk of ``raw_records``."""
        chunk = EncodedChunk(num_read=len(raw_records))
        examples: list[Example] = []
        prompts: list[str] = []
        for raw in raw_records:
            try:
                example, prompt = self._prepare(raw)
            except RecordError as error:
                chunk.bad_records.append(BadRecord(raw.path, raw.number, str(error)))
            else:
                examples.append(example)
                prompts.append(prompt)
        responses = [example.response for example in examples] if self._settings.task == "sft" else [""] * len(examples)
        all_ids = self.tokenizer.encode_batch([*prompts, *responses])
        for example, prompt_ids, response_ids in zip(examples, all_ids, all_ids[len(examples) :]):
            if self._end_id is not None:
                response_ids = [*response_ids, self._end_id]
            if self._fits(len(prompt_ids), len(response_ids)):
                chunk.records.append(EncodedRecord(prompt_ids, response_ids, example.answer, example.source_id))
            else:
                chunk.num_too_long += 1
        return chunk

    def _prepare(self, raw: RawRecord | BadRecord) -> tuple[Example, str]:
        if isinstance(raw, BadRecord):
            raise RecordError(raw.reason)
        source = self._settings.source_names[str(raw.path)]
        example = with_source(self._handler(raw.fields), f"{source}:{raw.number}")
        if self._settings.task == "sft" and example.response is None:
            raise RecordError("no response to train on; handler map_keys takes one: response=KEY")
        prompt = self.template.render(example)
        for text in (prompt, example.answer, example.response or ""):
            _check_storable(text)
        return example, prompt

    def _fits(self, prompt_length: int, response_length: int) -> bool:
        max_length = self._settings.max_length
        fits_row = max_length is None or prompt_length + response_length <= max_length
        return fits_row and prompt_length <= self._settings.max_prompt_length


def _check_storable(text: str) -> None:
    """JSON escapes can spell what UTF-8 cannot hold, and MindRecord loses trailing NULs."""
    if "\0" in text:
        raise RecordError("text holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"text holds half of a surrogate pair at character {error.start}") from error
