"""The data of a build as a whole: what stands in it several times, contradicts itself, or goes nowhere.

One pass over the records; 24 bytes of digests are kept of each, and each kind of name is counted up to a bound.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindrlhf.data.encoding import EncodedChunk

MAX_NAMES, OTHERS = 200, "others"
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Repeats:
    """Prompts that stand more than once among the records of a file, whose places count from 0.

    Attributes:
        num_duplicates: records that equal an earlier one in all that a run reads of them.
        num_prompts, num_records: different prompts that stand more than once, and the records they stand in.
        most, most_at: how often the most frequent prompt stands, and its first place.
        num_contradictory: prompts with more than one answer.
        contradiction: places of two records with one prompt and different answers; empty without such.
    """

    num_duplicates: int = 0
    num_prompts: int = 0
    num_records: int = 0
    most: int = 1
    most_at: int = 0
    num_contradictory: int = 0
    contradiction: tuple[int, ...] = ()


@dataclass
class DataLook:
    """What a build sees of the records that it keeps."""

    drops_duplicates: bool = False
    num_dropped: int = 0  # duplicates
    num_without_answer: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    unrendered: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    _digests: array = field(default_factory=lambda: array("Q"))
    _seen: set[int] = field(default_factory=set)

    def add(self, chunk: EncodedChunk) -> EncodedChunk:
        """Take a chunk in; return it, without the records that equal earlier ones where these are to be dropped."""
        digests = chunk.digests()
        if self.drops_duplicates:
            dropped = []
            for digest in digests[:, 2].tolist():
                dropped.append(digest in self._seen)
                self._seen.add(digest)
            self.num_dropped += sum(dropped)
            chunk, digests = chunk.without(dropped), digests[~np.array(dropped, bool)]
        self._digests.frombytes(digests.tobytes())
        self.num_without_answer += sum(not record.answer for record in chunk.records)
        for mine, new in ((self.unread, chunk.unread), (self.unrendered, chunk.unrendered), (self.notes, chunk.notes)):
            count_bounded(mine, new)
        return chunk

    def repeats(self) -> Repeats:
        """Return what stands several times among the records so far."""
        digests = np.frombuffer(self._digests, np.uint64).reshape(-1, 3)
        if not len(digests):
            return Repeats()
        prompts, answers, records = digests.T
        order = np.lexsort((np.arange(len(prompts)), answers, prompts))
        is_same = prompts[order][1:] == prompts[order][:-1]
        starts = np.flatnonzero(np.append(True, ~is_same))
        counts = np.diff(np.append(starts, len(order)))
        parts = is_same & (answers[order][1:] != answers[order][:-1])
        firsts = np.minimum.reduceat(order, starts)
        most = int(np.lexsort((firsts, -counts))[0])
        (parted,) = np.nonzero(parts)
        contradictory = np.unique(np.searchsorted(starts, parted, side="right"))
        return Repeats(
            num_duplicates=len(records) - len(np.unique(records)),
            num_prompts=int((counts > 1).sum()),
            num_records=int(counts[counts > 1].sum()),
            most=int(counts[most]),
            most_at=int(firsts[most]),
            num_contradictory=len(contradictory),
            contradiction=tuple(order[parted[0] : parted[0] + 2].tolist()) if len(parted) else (),
        )


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


def described(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return what of a look is not 0 or empty, counters as dicts with the most frequent names first."""
    plain = {name: dict(one.most_common()) if isinstance(one, Counter) else one for name, one in values}
    return {name: one for name, one in plain.items() if one}
