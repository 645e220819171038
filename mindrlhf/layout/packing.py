"""Which samples share a row, and which rank computes which rows: packing by length and by cost.

Rows are filled by best fit, the largest first (Johnson et al. 1974, "Worst-case performance bounds for simple
one-dimensional packing algorithms"): with whole groups of samples, whose prompt a row holds once, then with parts of
groups; rows that are nearly empty hand what they hold to free places of others. Rows go to ranks by longest processing
time first (Graham 1969, "Bounds on multiprocessing timing anomalies"). All is a function of the lengths: ties keep the
order of the input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindrlhf.data.packing import Row
from mindrlhf.specs import ModelDims


@dataclass(frozen=True)
class Piece:
    """What one sample takes in a row: ``size`` places, and ``prefix_size`` more in a row without its group."""

    size: int
    prefix_size: int = 0
    group: int = 0  # samples of one group have one prefix


@dataclass(frozen=True)
class RowCost:
    """The work of a row, in any unit: its positions, pairs of positions (attention), and labels (the vocabulary)."""

    per_position: float = 1.0
    per_pair: float = 0.0
    per_label: float = 0.0

    def of(self, length: int, num_labels: int = 0) -> float:
        """The cost of a row; places that hold nothing cost what others do, but for the vocabulary."""
        return self.per_position * length + self.per_pair * length**2 + self.per_label * num_labels


def row_cost(dims: ModelDims) -> RowCost:
    """Return the multiplications of a forward pass; experts that are not asked count nothing."""
    attention = dims.num_heads * dims.head_dim
    projections = dims.hidden_size * (2 * attention + 2 * dims.num_kv_heads * dims.head_dim)
    widths = [
        dims.experts.num_active * dims.experts.intermediate_size + dims.experts.shared_size
        if dims.has_experts(layer)
        else dims.intermediate_size
        for layer in range(dims.num_layers)
    ]
    return RowCost(
        per_position=float(dims.num_layers * projections + 3 * dims.hidden_size * sum(widths)),
        per_pair=float(dims.num_layers * 2 * attention),
        per_label=float(dims.hidden_size * dims.vocab_size),
    )


def plan_best_fit(pieces: Sequence[Piece], row_lengths: Sequence[int], cost: RowCost) -> list[Row]:
    """Assign every piece to exactly one row, such that the rows cost little.

    Rows are planned once for each length as the longest, alone and with the shorter ones, and the cheapest plan is
    taken. With shorter ones there are two plans: all rows are opened with the longest, or each with the shortest that
    holds what it begins with (a few long samples, whose pairs of positions cost most, then make few long rows). Each
    row has the shortest of its plan's lengths that holds it; pieces of one group are neighbours in it.

    Args:
        pieces: of the samples, in order.
        row_lengths: allowed row lengths, ascending.
        cost: of a row.

    Returns:
        The rows, grouped by length ascending.

    Raises:
        ValueError: a piece fits no row.
    """
    if not pieces:
        return []
    largest = max(range(len(pieces)), key=lambda item: pieces[item].size + pieces[item].prefix_size)
    needed = pieces[largest].size + pieces[largest].prefix_size
    if needed > row_lengths[-1]:
        raise ValueError(f"sample {largest} takes {needed} tokens, more than the sequence length, {row_lengths[-1]}")
    lengths = [length for length in row_lengths if length >= needed]
    mixed = [[short for short in row_lengths if short <= length] for length in lengths]
    plans = [_plan(pieces, choice) for choice in mixed]
    plans += [_plan(pieces, [length]) for length in lengths if length > row_lengths[0]]
    plans += [_plan(pieces, choice, is_tight=True) for choice in mixed if len(choice) > 1]
    best = min(plans, key=lambda rows: sum(cost.of(row.length) for row in rows))
    return sorted(best, key=lambda row: (row.length, row.items))


def _plan(pieces: Sequence[Piece], row_lengths: Sequence[int], *, is_tight: bool = False) -> list[Row]:
    """Plan rows of at most the last of ``row_lengths``: one after the other, each filled as far as it can be.

    A tight plan opens a row no longer than the largest bundle that is left, which it begins with.
    """
    left = sorted(_bundles(pieces, row_lengths[-1]), key=_largest_first)
    rows: list[_OpenRow] = []
    while left:
        row = _OpenRow(_shortest(row_lengths, left[0].used) if is_tight else row_lengths[-1])
        rows.append(row)
        _fill(row, left, pieces)
    for row in rows:
        row.length = _shortest(row_lengths, row.used)
    _close_nearly_empty(rows, pieces, row_lengths)
    return [Row(row.length, row.ordered(pieces)) for row in rows]


def _largest_first(bundle: "_OpenRow") -> tuple[int, int]:
    return -bundle.used, bundle.items[0]


def _fill(row: "_OpenRow", left: "list[_OpenRow]", pieces: Sequence[Piece]) -> None:
    """Move to an empty row what fits of the bundles ``left``: the largest that does, else the largest part of one.

    A part leaves its prefix to be repeated, but takes room that nothing else would. The bundles are in order, the
    largest first, and are left so.
    """
    are_ordered, first = True, 0
    while True:
        room = row.room
        # Bundles before the last choice were too large for more room than there is now.
        place = next((number for number in range(first, len(left)) if left[number].used <= room), None)
        if place is not None:
            for item in left.pop(place).items:
                row.add(item, pieces[item])
            first = place
            continue
        part = _largest_part(left, row, pieces)
        if part is None:
            break
        bundle, items = part
        for item in items:
            bundle.remove(item, pieces[item])
            row.add(item, pieces[item])
        if not bundle.items:
            left.remove(bundle)
        are_ordered, first = False, 0
    if not are_ordered:
        left.sort(key=_largest_first)


def _largest_part(
    left: "Sequence[_OpenRow]", row: "_OpenRow", pieces: Sequence[Piece]
) -> "tuple[_OpenRow, list[int]] | None":
    """Return a bundle that does not fit and the most of its pieces that do."""
    best, most, free = None, 0, 0
    for bundle in left:
        first = pieces[bundle.items[0]]
        if len(bundle.items) == 1 and first.group not in row.members:
            continue  # its only part is all of it
        room = row.room - (row.need(first) - first.size)
        if room > most:
            size = largest_sum([pieces[item].size for item in bundle.items], room)
            if size > most:
                best, most, free = bundle, size, room
    if best is None:
        return None
    part = largest_subset([pieces[item].size for item in best.items], free)
    return best, [best.items[number] for number in part]


def largest_sum(sizes: Sequence[int], room: int) -> int:
    """Return the largest sum of some of the sizes that is at most ``room``, 0 or more."""
    reached = 1  # bit n: some of the sizes make n
    for size in sizes:
        reached |= reached << size
    return (reached & ((1 << (room + 1)) - 1)).bit_length() - 1


def largest_subset(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Return the numbers of the sizes whose sum is largest of those that are at most ``room``."""
    reached: dict[int, tuple[int, ...]] = {0: ()}
    for number, size in enumerate(sizes):
        for total, numbers in list(reached.items()):
            if total + size <= room:
                reached.setdefault(total + size, (*numbers, number))
    return reached[max(reached)]


@dataclass
class _OpenRow:
    """A row that is being filled, or a bundle of pieces of one group that go into a row together."""

    length: int
    used: int = 0
    items: list[int] = field(default_factory=list)
    members: dict[int, int] = field(default_factory=dict)  # group -> its pieces here

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


def _bundles(pieces: Sequence[Piece], row_length: int) -> list[_OpenRow]:
    """Return the groups, and those that fill more than a row in several bundles, best fit decreasing."""
    bundles: dict[int, list[_OpenRow]] = {}
    for item in sorted(range(len(pieces)), key=lambda item: (-pieces[item].size, item)):
        piece = pieces[item]
        own = bundles.setdefault(piece.group, [])
        fitting = [bundle for bundle in own if bundle.room >= bundle.need(piece)]
        if not fitting:
            fitting = [_OpenRow(row_length)]
            own += fitting
        min(fitting, key=lambda bundle: bundle.room).add(item, piece)
    return [bundle for own in bundles.values() for bundle in own]


def _shortest(row_lengths: Sequence[int], used: int) -> int:
    return next(length for length in row_lengths if length >= used)


def _close_nearly_empty(rows: list[_OpenRow], pieces: Sequence[Piece], row_lengths: Sequence[int]) -> None:
    """Move pieces out of the emptiest rows into room that others have, where that closes or shortens a row."""
    rooms = _rooms(rows)
    for row in sorted(rows, key=lambda row: row.used):
        if not _may_be_shortened(row, pieces, row_lengths, rooms):
            continue
        moved = []
        for item in sorted(row.items, key=lambda item: (-pieces[item].size, item)):
            piece = pieces[item]
            fitting = [other for other in rows if other is not row and other.room >= other.need(piece)]
            if fitting:
                target = min(fitting, key=lambda other: (other.need(piece), other.room))
                row.remove(item, piece)
                target.add(item, piece)
                moved.append((item, target))
        if not row.items:
            rows.remove(row)
        elif _shortest(row_lengths, row.used) < row.length:
            row.length = _shortest(row_lengths, row.used)
        else:
            for item, target in moved:
                target.remove(item, pieces[item])
                row.add(item, pieces[item])
            continue
        rooms = _rooms(rows)


def _rooms(rows: Sequence[_OpenRow]) -> list[int]:
    """Return the rooms of the rows, the largest first, and that of no row."""
    return [*sorted((row.room for row in rows), reverse=True), 0]


def _may_be_shortened(row: _OpenRow, pieces: Sequence[Piece], row_lengths: Sequence[int], rooms: Sequence[int]) -> bool:
    """Whether other rows could take enough of a row, one of those of the ``rooms``: most are full, few pieces fit."""
    excess = row.used - max((length for length in row_lengths if length < row.length), default=0)
    most_room = rooms[1] if row.room == rooms[0] else rooms[0]  # of another
    movable = [pieces[item] for item in row.items if pieces[item].size <= most_room]
    prefixes = sum(piece.prefix_size for piece in movable)
    return prefixes + min(sum(piece.size for piece in movable), sum(rooms) - row.room) >= excess


def deal_rows(costs: Sequence[float], num_ranks: int, *, most: int | None = None) -> list[list[int]]:
    """Give every row to a rank, the costliest first, each to the rank that has least so far.

    So no rank has more than the mean and one row: max <= sum / num_ranks + (1 - 1 / num_ranks) * max(costs).

    Args:
        costs: of the rows.
        num_ranks: ranks.
        most: rows that a rank may get; None: any number.

    Returns:
        For each rank the numbers of its rows, ascending.
    """
    loads = [0.0] * num_ranks
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        open_ranks = [rank for rank in range(num_ranks) if most is None or len(dealt[rank]) < most]
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        loads[rank] += costs[row]
        dealt[rank].append(row)
    return [sorted(rows) for rows in dealt]


def micro_batch_sizes(most: int) -> tuple[int, ...]:
    """The row counts of micro-batches, descending: ``most``, a quarter of it, and so on, down to 1.

    Few, since each is another graph to compile; down to 1, so that no row must be padding.
    """
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(max(1, sizes[-1] // 4))
    return tuple(sizes)


def cut(num_rows: int, sizes: Sequence[int]) -> list[int]:
    """Cut rows into micro-batches of the allowed sizes (descending, the last 1), as few as there can be."""
    counts = []
    for size in sizes:
        while num_rows >= size:
            counts.append(size)
            num_rows -= size
    return counts
