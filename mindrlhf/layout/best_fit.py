"""Rows by best fit, the largest first (Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional
packing algorithms"), with whole groups of samples, whose prompt a row holds once, and then with parts of groups.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mindrlhf.data.packing import Row

# So many of the largest bundles are asked for a part, so many of the emptiest rows are looked at again.
_NUM_ASKED, _NUM_EMPTIEST = 128, 64


@dataclass(frozen=True)
class Piece:
    """Size of a sample in a row: ``size`` places, and ``prefix_size`` more in a row without its group."""

    size: int
    prefix_size: int = 0
    group: int = 0  # samples of one group have one prefix


@dataclass(eq=False, slots=True)
class _OpenRow:
    """A row that is being filled, or a bundle of pieces of one group that go into a row together."""

    length: int
    used: int = 0
    items: list[int] = field(default_factory=list)
    members: dict[int, int] = field(default_factory=dict)  # group -> its pieces here
    place: tuple[int, int] = (0, 0)  # of a bundle among those that are left: the largest first
    sums: int = 0  # of a bundle's pieces, 0 until they are asked for

    @property
    def room(self) -> int:
        return self.length - self.used

    def need(self, piece: Piece) -> int:
        """Places that a piece would take here."""
        return piece.size + (0 if piece.group in self.members else piece.prefix_size)

    def add(self, item: int, piece: Piece) -> None:
        self.used += self.need(piece)
        self.items.append(item)
        self.members[piece.group] = self.members.get(piece.group, 0) + 1

    def remove(self, item: int, piece: Piece) -> None:
        self.items.remove(item)
        self.members[piece.group] -= 1
        if not self.members[piece.group]:
            del self.members[piece.group]
        self.used -= self.need(piece)
        self.sums = 0

    def ordered(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """The pieces by group, groups and pieces in the order of the input."""
        first: dict[int, int] = {}
        for item in sorted(self.items):
            first.setdefault(pieces[item].group, item)
        return tuple(sorted(self.items, key=lambda item: (first[pieces[item].group], item)))

    def largest_sum(self, pieces: Sequence[Piece], room: int) -> int:
        """Return the largest sum of some of the pieces that is at most ``room``, 0 or more."""
        self.sums = self.sums or reachable(pieces[item].size for item in self.items)
        return (self.sums & ((1 << (max(room, 0) + 1)) - 1)).bit_length() - 1


def reachable(sizes: Iterable[int]) -> int:
    """Return the sums that some of the sizes make, as bits: bit n is set where they make n."""
    reached = 1
    for size in sizes:
        reached |= reached << size
    return reached


def largest_subset(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Return the numbers of the sizes whose sum is largest of those that are at most ``room``."""
    reached: dict[int, tuple[int, ...]] = {0: ()}
    for number, size in enumerate(sizes):
        for total, numbers in list(reached.items()):
            if total + size <= room:
                reached.setdefault(total + size, (*numbers, number))
    return reached[max(reached)]


def plan(pieces: Sequence[Piece], row_lengths: Sequence[int], *, is_tight: bool = False) -> list[Row]:
    """Plan rows of at most the last of ``row_lengths``: one after the other, each filled as far as it can be.

    A tight plan opens a row no longer than the largest bundle that is left, which it begins with.
    """
    left: list[_OpenRow] = []
    for bundle in _bundles(pieces, row_lengths[-1]):
        _put_in_order(left, bundle)
    rows: list[_OpenRow] = []
    while left:
        rows.append(_OpenRow(_shortest(row_lengths, left[0].used) if is_tight else row_lengths[-1]))
        _fill(rows[-1], left, pieces)
    for row in rows:
        row.length = _shortest(row_lengths, row.used)
    _close_nearly_empty(rows, pieces, row_lengths)
    return [Row(row.length, row.ordered(pieces)) for row in rows if row.items]


def _put_in_order(left: list[_OpenRow], bundle: _OpenRow) -> None:
    bundle.place = (-bundle.used, bundle.items[0])
    insort(left, bundle, key=lambda other: other.place)


def _bundles(pieces: Sequence[Piece], row_length: int) -> list[_OpenRow]:
    """Return the groups, and those that fill more than a row in several bundles, best fit decreasing."""
    bundles: dict[int, list[_OpenRow]] = {}
    for item in sorted(range(len(pieces)), key=lambda item: (-pieces[item].size, item)):
        piece = pieces[item]
        own = bundles.setdefault(piece.group, [])
        fitting = [bundle for bundle in own if bundle.room >= piece.size]  # each of them has the prefix
        if not fitting:
            own.append(_OpenRow(row_length))
        min(fitting, key=lambda bundle: bundle.room, default=own[-1]).add(item, piece)
    return [bundle for own in bundles.values() for bundle in own]


def _fill(row: _OpenRow, left: list[_OpenRow], pieces: Sequence[Piece]) -> None:
    """Move to an empty row what fits: the largest bundle that does, else the largest part of one.

    A part leaves its prefix to be repeated, but takes room that nothing else would. A bundle of which the row took a
    part keeps its place until the row is full.
    """
    parted: list[_OpenRow] = []
    while True:
        number = bisect_left(left, (-row.room, 0), key=lambda bundle: bundle.place)
        fitting = [*left[number : number + 1], *(bundle for bundle in parted if bundle.used <= row.room)]
        if fitting:
            bundle = min(fitting, key=lambda bundle: bundle.place)
            items = list(bundle.items)
        else:
            bundle, items = _largest_part(row, [*parted, *left[:_NUM_ASKED]], pieces)
        if not items:
            break
        if bundle not in parted:
            left.remove(bundle)
            parted.append(bundle)
        for item in items:
            bundle.remove(item, pieces[item])
            row.add(item, pieces[item])
        if not bundle.items:
            parted.remove(bundle)
    for bundle in parted:
        _put_in_order(left, bundle)


def _largest_part(row: _OpenRow, asked: Sequence[_OpenRow], pieces: Sequence[Piece]) -> tuple[_OpenRow, list[int]]:
    """Return the bundle that has most pieces that fit, of several the first in order, and these pieces."""
    offers = []
    for bundle in asked:
        first = pieces[bundle.items[0]]
        if len(bundle.items) == 1 and first.group not in row.members:
            continue  # it would have fitted whole
        free = row.room - (0 if first.group in row.members else first.prefix_size)
        offers.append((-bundle.largest_sum(pieces, free), bundle.place, free, bundle))
    _, _, free, bundle = min(offers, key=lambda offer: offer[:2], default=(0, (0, 0), 0, _OpenRow(0)))
    part = largest_subset([pieces[item].size for item in bundle.items], free)
    return bundle, [bundle.items[number] for number in part]


def _shortest(row_lengths: Sequence[int], used: int) -> int:
    return next(length for length in row_lengths if length >= used)


def _close_nearly_empty(rows: list[_OpenRow], pieces: Sequence[Piece], row_lengths: Sequence[int]) -> None:
    """Move pieces out of the emptiest rows into room that others have, where that closes or shortens a row."""
    for row in sorted(rows, key=lambda row: row.used)[:_NUM_EMPTIEST]:
        moved = []
        for item in sorted(row.items, key=lambda item: (-pieces[item].size, item)):
            fitting = [
                other for other in rows if other is not row and other.items and other.need(pieces[item]) <= other.room
            ]
            if fitting:
                target = min(fitting, key=lambda other: (other.need(pieces[item]), other.room))
                row.remove(item, pieces[item])
                target.add(item, pieces[item])
                moved.append((item, target))
        if row.items and _shortest(row_lengths, row.used) == row.length:
            for item, target in moved:
                target.remove(item, pieces[item])
                row.add(item, pieces[item])
        if row.items:
            row.length = _shortest(row_lengths, row.used)
