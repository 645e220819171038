"""Rows by best fit, the largest first (Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional
packing algorithms"): what is sought by its size is found in a sorted list, so that a sample costs no more among many.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mindrlhf.data.packing import Row

Value = TypeVar("Value")
# So many bundles with a small enough piece are looked at one by one, more by their prefixes.
_FEW = 256


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
    number: int = 0  # of a row among the others
    # Of a bundle that is left: its place among the others, the largest first; what it is found by, None where it is
    # one piece; and the sums of its pieces, 0 until they are asked for.
    place: tuple[int, int] = (0, 0)
    entry: tuple[int, int] | None = None
    sums: int = 0

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

    def ordered(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """The pieces by group, groups and pieces in the order of the input."""
        first: dict[int, int] = {}
        for item in sorted(self.items):
            first.setdefault(pieces[item].group, item)
        return tuple(sorted(self.items, key=lambda item: (first[pieces[item].group], item)))

    def largest_sum(self, pieces: Sequence[Piece], room: int) -> int:
        """Return the largest sum of some of the pieces that is at most ``room``, 0 or more."""
        self.sums = self.sums or reachable(pieces[item].size for item in self.items)
        return (self.sums & ((1 << (room + 1)) - 1)).bit_length() - 1


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


class _Sorted(Generic[Value]):
    """Values by a number: the numbers in order, and of one number the values in order."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.values: dict[int, list[Value]] = {}

    def add(self, key: int, value: Value) -> None:
        if key not in self.values:
            insort(self.keys, key)
            self.values[key] = []
        insort(self.values[key], value)

    def remove(self, key: int, value: Value) -> None:
        values = self.values[key]
        del values[bisect_left(values, value)]
        if not values:
            del self.values[key]
            del self.keys[bisect_left(self.keys, key)]


def plan(pieces: Sequence[Piece], row_lengths: Sequence[int], *, is_tight: bool = False) -> list[Row]:
    """Plan rows of at most the last of ``row_lengths``: one after the other, each filled as far as it can be.

    A tight plan opens a row no longer than the largest bundle that is left, which it begins with.
    """
    left = _Left(pieces, _bundles(pieces, row_lengths[-1]))
    rows: list[_OpenRow] = []
    while left.by_size.keys:
        longest = _shortest(row_lengths, left.by_size.keys[-1]) if is_tight else row_lengths[-1]
        row = _OpenRow(longest, number=len(rows))
        rows.append(row)
        left.fill(row)
    for row in rows:
        row.length = _shortest(row_lengths, row.used)
    _close_nearly_empty(rows, pieces, row_lengths)
    return [Row(row.length, row.ordered(pieces)) for row in rows if row.items]


def _bundles(pieces: Sequence[Piece], row_length: int) -> list[_OpenRow]:
    """Return the groups, and those that fill more than a row in several bundles, best fit decreasing."""
    bundles: dict[int, list[_OpenRow]] = {}
    rooms: dict[int, _Sorted[int]] = defaultdict(_Sorted)
    for item in sorted(range(len(pieces)), key=lambda item: (-pieces[item].size, item)):
        piece = pieces[item]
        own, free = bundles.setdefault(piece.group, []), rooms[piece.group]
        place = bisect_left(free.keys, piece.size)  # each of them has the prefix
        if place < len(free.keys):
            number = free.values[free.keys[place]][0]
            free.remove(own[number].room, number)
        else:
            number = len(own)
            own.append(_OpenRow(row_length))
        own[number].add(item, piece)
        free.add(own[number].room, number)
    return [bundle for own in bundles.values() for bundle in own]


class _Left:
    """The bundles that are in no row yet, in order: the largest first, of one size that of the first piece.

    A bundle of which a row took a part keeps its place until that row is full.
    """

    def __init__(self, pieces: Sequence[Piece], bundles: Iterable[_OpenRow]):
        self._pieces = pieces
        self.by_size: _Sorted[int] = _Sorted()  # used -> their first pieces
        self._bundles: dict[int, _OpenRow] = {}  # by a piece of theirs, the first when they were put in order
        self._of_group: dict[int, list[_OpenRow]] = {}
        # Those of several pieces: by their prefix and smallest piece together, and by their prefix.
        self._by_need: list[tuple[int, int, int]] = []
        self._by_prefix: _Sorted[tuple[int, int]] = _Sorted()
        self._changed: list[_OpenRow] = []
        for bundle in bundles:
            self._of_group.setdefault(pieces[bundle.items[0]].group, []).append(bundle)
            self._put_in_order(bundle)

    def fill(self, row: _OpenRow) -> None:
        """Move to an empty row what fits: the largest bundle that does, else the largest part of one.

        A part leaves its prefix to be repeated, but takes room that nothing else would.
        """
        while True:
            if bundle := self._first_fitting(row.room):
                self._take_out(bundle)
                for item in bundle.items:
                    row.add(item, self._pieces[item])
                self._of_group[self._pieces[bundle.items[0]].group].remove(bundle)
            elif found := self._largest_part(row):
                self._take_part(row, *found)
            else:
                break
        for bundle in self._changed:
            self._drop_parts(bundle)
            self._put_in_order(bundle)
        self._changed.clear()

    def _first_fitting(self, room: int) -> _OpenRow | None:
        """Return the first bundle in order that takes no more than ``room``."""
        fitting = [bundle for bundle in self._changed if bundle.used <= room]
        place = bisect_right(self.by_size.keys, room)
        if place:
            fitting.append(self._bundles[self.by_size.values[self.by_size.keys[place - 1]][0]])
        return min(fitting, key=lambda bundle: bundle.place, default=None)

    def _largest_part(self, row: _OpenRow) -> tuple[_OpenRow, list[int]] | None:
        """Return a bundle that does not fit and the most of its pieces that do; of several the first in order."""
        pieces = self._pieces
        # A prefix that is in the row already is not needed again.
        known = [bundle for group in row.members for bundle in self._of_group.get(group, ())]
        best = min(((-bundle.largest_sum(pieces, row.room), bundle.place) for bundle in known), default=(0, (0, 0)))
        count = bisect_right(self._by_need, (row.room, len(pieces), 0))
        if count <= _FEW:
            best = min([best, *(self._offer(place, row.room) for _, *place in self._by_need[:count])])
        else:
            for prefix in self._by_prefix.keys:
                if row.room - prefix < max(-best[0], 1):
                    break
                best = self._best_of(prefix, row.room - prefix, best)
        if not best[0]:
            return None
        bundle = self._bundles[best[1][1]]
        has_prefix = pieces[bundle.items[0]].group in row.members
        free = row.room - (0 if has_prefix else pieces[bundle.items[0]].prefix_size)
        part = largest_subset([pieces[item].size for item in bundle.items], free)
        return bundle, [bundle.items[number] for number in part]

    def _offer(self, place: Sequence[int], room: int) -> tuple[int, tuple[int, int]]:
        """Return minus the most of a bundle's pieces that fit, with its place."""
        bundle = self._bundles[place[1]]
        return -bundle.largest_sum(self._pieces, room - bundle.entry[0]), bundle.place

    def _best_of(self, prefix: int, room: int, best: tuple[int, tuple[int, int]]) -> tuple[int, tuple[int, int]]:
        """Return ``best``, or what a bundle of one prefix offers that is better, for ``room`` beside that prefix."""
        for place in self._by_prefix.values[prefix]:  # in order: the first that fills all of the room is the best
            if best[0] == -room and best[1] < place:
                break
            bundle = self._bundles[place[1]]
            if bundle.entry[1] <= room:
                best = min(best, (-bundle.largest_sum(self._pieces, room), place))
        return best

    def _take_part(self, row: _OpenRow, bundle: _OpenRow, items: list[int]) -> None:
        if bundle not in self._changed:
            self._take_out(bundle)
            self._changed.append(bundle)
        else:
            self._drop_parts(bundle)
        for item in items:
            bundle.remove(item, self._pieces[item])
            row.add(item, self._pieces[item])
        bundle.sums = 0
        if bundle.items:
            self._bundles[bundle.place[1]] = bundle
            self._offer_parts(bundle)
        else:
            self._changed.remove(bundle)
            self._of_group[self._pieces[items[0]].group].remove(bundle)

    def _put_in_order(self, bundle: _OpenRow) -> None:
        first = bundle.items[0]
        bundle.place = (-bundle.used, first)
        self._bundles[first] = bundle
        self.by_size.add(bundle.used, first)
        self._offer_parts(bundle)

    def _take_out(self, bundle: _OpenRow) -> None:
        if bundle in self._changed:
            self._changed.remove(bundle)
        else:
            self.by_size.remove(-bundle.place[0], bundle.place[1])
        self._drop_parts(bundle)
        del self._bundles[bundle.place[1]]

    def _offer_parts(self, bundle: _OpenRow) -> None:
        if len(bundle.items) > 1:
            smallest = min(self._pieces[item].size for item in bundle.items)
            bundle.entry = (self._pieces[bundle.items[0]].prefix_size, smallest)
            insort(self._by_need, (sum(bundle.entry), *bundle.place))
            self._by_prefix.add(bundle.entry[0], bundle.place)

    def _drop_parts(self, bundle: _OpenRow) -> None:
        if bundle.entry is not None:
            del self._by_need[bisect_left(self._by_need, (sum(bundle.entry), *bundle.place))]
            self._by_prefix.remove(bundle.entry[0], bundle.place)
            bundle.entry = None


def _shortest(row_lengths: Sequence[int], used: int) -> int:
    return next(length for length in row_lengths if length >= used)


def _close_nearly_empty(rows: list[_OpenRow], pieces: Sequence[Piece], row_lengths: Sequence[int]) -> None:
    """Move pieces out of the emptiest rows into room that others have, where that closes or shortens a row."""
    others = _Others(rows, pieces)
    for row in sorted(rows, key=lambda row: row.used):
        if not others.may_take(row, row_lengths):
            continue
        others.forget(row)
        moved = []
        for item in sorted(row.items, key=lambda item: (-pieces[item].size, item)):
            if target := others.best_for(pieces[item]):
                row.remove(item, pieces[item])
                others.forget(target)
                target.add(item, pieces[item])
                others.know(target)
                moved.append((item, target))
        if row.items and _shortest(row_lengths, row.used) == row.length:
            for item, target in moved:
                others.forget(target)
                target.remove(item, pieces[item])
                others.know(target)
                row.add(item, pieces[item])
        if row.items:
            row.length = _shortest(row_lengths, row.used)
            others.know(row)


class _Others:
    """Rows by the room that they have, and by the groups that are in them."""

    def __init__(self, rows: Sequence[_OpenRow], pieces: Sequence[Piece]):
        self._rows, self._pieces = rows, pieces
        self._by_room: _Sorted[int] = _Sorted()
        self._of_group: dict[int, set[int]] = {}
        self._total = 0
        for row in rows:
            self.know(row)

    def know(self, row: _OpenRow) -> None:
        self._by_room.add(row.room, row.number)
        self._total += row.room
        for group in row.members:
            self._of_group.setdefault(group, set()).add(row.number)

    def forget(self, row: _OpenRow) -> None:
        self._by_room.remove(row.room, row.number)
        self._total -= row.room
        for group in row.members:
            self._of_group[group].discard(row.number)

    def best_for(self, piece: Piece) -> _OpenRow | None:
        """Return the row that a piece takes least places of, of those the one with least room, of those the first."""
        size = piece.size
        if piece.prefix_size:
            with_prefix = (self._rows[number] for number in self._of_group.get(piece.group, ()))
            fitting = [row for row in with_prefix if row.room >= size]
            if fitting:
                return min(fitting, key=lambda row: (row.room, row.number))
            size += piece.prefix_size
        place = bisect_left(self._by_room.keys, size)
        if place == len(self._by_room.keys):
            return None
        return self._rows[self._by_room.values[self._by_room.keys[place]][0]]

    def may_take(self, row: _OpenRow, row_lengths: Sequence[int]) -> bool:
        """True when other rows could take enough of a row: most are full, few pieces fit."""
        excess = row.used - max((length for length in row_lengths if length < row.length), default=0)
        rooms, numbers = self._by_room.keys, self._by_room.values
        is_alone = row.room == rooms[-1] and len(numbers[rooms[-1]]) == 1
        most_room = rooms[-1] if not is_alone else rooms[-2] if len(rooms) > 1 else 0  # of another
        movable = [self._pieces[item] for item in row.items if self._pieces[item].size <= most_room]
        prefixes = sum(piece.prefix_size for piece in movable)
        return prefixes + min(sum(piece.size for piece in movable), self._total - row.room) >= excess
