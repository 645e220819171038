"""The work of one data worker: raw records to token ids, a chunk at a time.

Worker processes import this module, so it stays free of MindSpore, which costs seconds and 400 MB each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindrlhf.data.control_tokens import control_token_pattern, holds_control_token, neutralised
from mindrlhf.data.handlers import Example, RecordError, load_handler, with_source
from mindrlhf.data.mindrecord import RESPONSES
from mindrlhf.data.readers import BadRecord, RawRecord
from mindrlhf.data.templates import load_template, response_end_id
from mindrlhf.data.tokenizers import load_tokenizer


@dataclass(frozen=True)
class EncoderSettings:
    """All that decides how a record becomes ids; plain values, so that it can be sent to a worker.

    ``max_length`` bounds prompt + response for the tasks that have responses and is None for task "prompts".
    ``source_names`` gives the name of each input file (key: its path as text) in source ids. Control tokens that are
    written out in the data are written apart, unless ``keep_control_tokens``.
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


@dataclass(frozen=True)
class EncodedRecord:
    """Ids of one kept record."""

    prompt_ids: list[int]
    response_ids: list[int]
    answer: str
    source_id: str
    rejected_ids: list[int]
    verifier: str


@dataclass
class EncodedChunk:
    """What became of the records of one chunk, in their order."""

    records: list[EncodedRecord] = field(default_factory=list)
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
        self._control_tokens = control_token_pattern(self.tokenizer.control_tokens)
        self._response_fields = RESPONSES[settings.task]
        self._end_id = response_end_id(self.template, self.tokenizer) if self._response_fields else None

    def encode(self, raw_records: Sequence[RawRecord | BadRecord]) -> EncodedChunk:
        """Return the chunk of ``raw_records``."""
        chunk = EncodedChunk(num_read=len(raw_records))
        examples: list[Example] = []
        prompts: list[str] = []
        for raw in raw_records:
            try:
                example, prompt, is_controlled = self._prepare(raw)
            except RecordError as error:
                chunk.bad_records.append(BadRecord(raw.path, raw.number, str(error)))
            else:
                examples.append(example)
                prompts.append(prompt)
                chunk.num_with_control_tokens += is_controlled
        all_prompt_ids = self.tokenizer.encode_batch(prompts)
        response_ids, rejected_ids = (self._encode_responses(examples, name) for name in ("response", "rejected"))
        for example, *ids in zip(examples, all_prompt_ids, response_ids, rejected_ids):
            if self._fits(len(ids[0]), max(len(ids[1]), len(ids[2]))):
                texts = (example.answer, example.source_id)
                chunk.records.append(EncodedRecord(ids[0], ids[1], *texts, ids[2], example.verifier))
            else:
                chunk.num_too_long += 1
        return chunk

    def _encode_responses(self, examples: Sequence[Example], name: str) -> list[list[int]]:
        """Return the ids of one field of every example, end token appended; empty lists when the task has no such."""
        if name not in self._response_fields:
            return [[] for _ in examples]
        texts = [getattr(example, name) for example in examples]
        return [[*ids, self._end_id] for ids in self.tokenizer.encode_batch(texts)]

    def _prepare(self, raw: RawRecord | BadRecord) -> tuple[Example, str, bool]:
        """Return the example, its prompt, and whether the record's texts hold control tokens."""
        if isinstance(raw, BadRecord):
            raise RecordError(raw.reason)
        source = self._settings.source_names[str(raw.path)]
        example = with_source(self._handler(raw.fields), f"{source}:{raw.number}")
        for name in self._response_fields:
            if getattr(example, name) is None:
                raise RecordError(f"no {name} to train on; handler map_keys takes one: {name}=KEY")
        if "rejected" in self._response_fields and example.response == example.rejected:
            raise RecordError("the preferred and the rejected response are the same text")
        is_controlled = self._control_tokens is not None and holds_control_token(example, self._control_tokens)
        if is_controlled and not self._settings.keep_control_tokens:
            example = neutralised(example, self._control_tokens)
        prompt = self.template.render(example)
        for text in (prompt, example.answer, example.response or "", example.rejected or ""):
            _check_storable(text)
        return example, prompt, is_controlled

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
