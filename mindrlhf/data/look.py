"""Running totals of a build: what became of the records, and what stands out in the data as a whole.

One pass over the records; 40 bytes are kept of each, and each kind of name is counted up to a bound.
"""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindrlhf.data.encoding import EncodedChunk
from mindrlhf.data.mindrecord import no_ids
from mindrlhf.errors import UserError

NUM_REPORTED_BAD = 5
MAX_CHOICES = 100
MAX_NAMES, OTHERS = 200, "others"
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass
class BuildTotals:
    """Running totals of a build; ``drops_duplicates`` leaves out records that equal earlier ones."""

    drops_duplicates: bool = False
    num_read: int = 0
    num_bad: int = 0
    num_too_long: int = 0
    num_dropped: int = 0  # duplicates
    num_kept: int = 0
    num_with_control_tokens: int = 0
    num_without_answer: int = 0
    num_images: int = 0
    num_with_images: int = 0
    most_images: int = 0  # of one record
    most_image_tokens: int = 0  # of one image
    bad_examples: list[str] = field(default_factory=list)
    first_prompt: np.ndarray = field(default_factory=no_ids)
    lengths: tuple[Counter, Counter] = field(default_factory=lambda: (Counter(), Counter()))  # prompts, responses
    choices: set[str] = field(default_factory=set)  # of verifiers
    filled_columns: set[str] = field(default_factory=set)  # kept ones that are not null everywhere
    names: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in ("unread", "template", "notes", "bad")}
    )
    _digests: array = field(default_factory=lambda: array("Q"))
    _seen: set[int] = field(default_factory=set)
    _files: dict[str, int] = field(default_factory=dict)  # beginnings of source ids, by number
    _sources: array = field(default_factory=lambda: array("Q"))  # pairs: beginning, number in its file

    def add(self, chunk: EncodedChunk) -> EncodedChunk:
        """Count a chunk; return it with the records that are kept."""
        self.num_read += chunk.num_read
        self.num_bad += len(chunk.bad_records)
        self.num_too_long += chunk.num_too_long
        self.num_with_control_tokens += chunk.num_with_control_tokens
        num_wanted = NUM_REPORTED_BAD - len(self.bad_examples)
        self.bad_examples += [str(bad) for bad in chunk.bad_records[:num_wanted]]
        bad = Counter(bad.reason.partition("; ")[0] for bad in chunk.bad_records)
        for name, counts in (("unread", chunk.unread), ("template", chunk.unrendered), ("notes", chunk.notes)):
            count_bounded(self.names[name], counts)
        count_bounded(self.names["bad"], bad)
        chunk = self._without_duplicates(chunk)
        self.num_kept += len(chunk.records)
        for counter, lengths in zip(self.lengths, chunk.lengths().T):
            counter.update(lengths.tolist())
        for tokens in filter(None, chunk.image_tokens):
            self.num_images += len(tokens)
            self.num_with_images += 1
            self.most_images = max(self.most_images, len(tokens))
            self.most_image_tokens = max(self.most_image_tokens, *tokens)
        if chunk.records and not len(self.first_prompt):
            self.first_prompt = chunk.records[0].prompt_ids
        for record in chunk.records:
            self.filled_columns.update(name for name, value in record.extra.items() if value is not None)
            self.num_without_answer += not record.answer
            file, _, number = record.source_id.rpartition(":")
            self._sources.extend((self._files.setdefault(file, len(self._files)), int(number)))
        self.choices.update(record.verifier for record in chunk.records)
        if len(self.choices) > MAX_CHOICES:
            raise UserError(
                f"the records choose verifiers in over {MAX_CHOICES} ways: is 'verifier' mapped to another key?"
            )
        return chunk

    def _without_duplicates(self, chunk: EncodedChunk) -> EncodedChunk:
        digests = chunk.digests()
        if self.drops_duplicates:
            dropped = []
            for digest in digests[:, 2].tolist():
                dropped.append(digest in self._seen)
                self._seen.add(digest)
            self.num_dropped += sum(dropped)
            chunk, digests = chunk.without(dropped), digests[~np.array(dropped, bool)]
        self._digests.frombytes(digests.tobytes())
        return chunk

    def look(self, task: str) -> dict[str, Any]:
        """Return what stands out in the data as a whole, as JSON values: what is 0 or empty is left out.

        Keys: ``deduplicated`` (records left out), those of ``repeats``, ``without_answer``, or ``no_answers`` where all
        lack one; by name how many records have it: ``unread`` (columns that nothing read), ``template`` (what stands in
        no prompt), ``notes`` (how values were read), ``bad`` (reasons); ``prompt_tokens`` and ``response_tokens``
        (quantiles).
        """
        num_without = self.num_without_answer if task == "prompts" else 0
        values = {
            "deduplicated": self.num_dropped,
            **self.repeats(),
            "without_answer" if num_without < self.num_kept else "no_answers": num_without,
            **{name: dict(counts.most_common()) for name, counts in self.names.items()},
            "prompt_tokens": quantiles(self.lengths[0]),
            "response_tokens": quantiles(self.lengths[1]) if task != "prompts" else {},
        }
        return {name: value for name, value in values.items() if value}

    def repeats(self) -> dict[str, Any]:
        """Return what stands several times: ``duplicates`` (records that equal an earlier one in all that a run reads),
        ``repeated`` (prompts that stand more than once, the records they stand in, how often the most frequent does and
        where it comes first) and ``contradictory`` (prompts with different answers, and two such records)."""
        if not self._digests:
            return {}
        prompts, answers, records = np.frombuffer(self._digests, np.uint64).reshape(-1, 3).T
        order = np.lexsort((np.arange(len(prompts)), answers, prompts))
        is_same = prompts[order][1:] == prompts[order][:-1]
        starts = np.flatnonzero(np.append(True, ~is_same))
        counts = np.diff(np.append(starts, len(order)))
        firsts = np.minimum.reduceat(order, starts)
        (parted,) = np.nonzero(is_same & (answers[order][1:] != answers[order][:-1]))
        values = {"duplicates": len(records) - len(np.unique(records)), "repeated": {}, "contradictory": {}}
        if counts.max() > 1:
            most = np.lexsort((firsts, -counts))[0]
            values["repeated"] = {
                "prompts": int((counts > 1).sum()),
                "records": int(counts[counts > 1].sum()),
                "most": int(counts[most]),
                "first": self._source(firsts[most]),
            }
        if len(parted):
            num_prompts = len(np.unique(np.searchsorted(starts, parted, side="right")))
            example = " and ".join(map(self._source, order[parted[0] : parted[0] + 2]))
            values["contradictory"] = {"prompts": num_prompts, "example": example}
        return values

    def _source(self, index: int) -> str:
        """Return the source id of a record that was kept."""
        file, number = self._sources[2 * index : 2 * index + 2]
        return f"{list(self._files)[file]}:{number}"


def count_bounded(counts: Counter[str], new: Mapping[str, int]) -> None:
    """Add counts by name; names beyond ``MAX_NAMES`` share one."""
    for name, count in new.items():
        counts[name if name in counts or len(counts) < MAX_NAMES else OTHERS] += count


def quantiles(counter: Mapping[int, int]) -> dict[str, int]:
    """Return the lengths that so many per cent of the records do not exceed, from how many have each length."""
    lengths = np.array(sorted(counter))
    ends = np.cumsum([counter[length] for length in lengths.tolist()])
    places = np.searchsorted(ends, [max(1, share * ends[-1]) for share in _QUANTILES])
    return {f"{share:.0%}": int(lengths[place]) for share, place in zip(_QUANTILES, places)}
