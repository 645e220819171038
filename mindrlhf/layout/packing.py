"""Packing of samples into rows, and of rows onto ranks, by length and by cost.

Rows are filled by best fit, the largest first (Johnson et al. 1974, "Worst-case performance bounds for simple
one-dimensional packing algorithms"): with whole groups of samples, whose prompt a row holds once, then with parts of
groups; rows that are nearly empty hand what they hold to free places of others. Rows go to ranks by longest processing
time first (Graham 1969, "Bounds on multiprocessing timing anomalies"). All is a function of the lengths: ties keep the
order of the input.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.data.packing import Row
from mindrlhf.layout.best_fit import Piece, plan
from mindrlhf.specs import ModelDims


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
    projections = dims.hidden_size * (attention + dims.num_kv_heads * (dims.query_rows + 2 * dims.head_dim))
    num_full, linear = dims.num_layers, 0
    if dims.linear:
        num_full -= sum(dims.linear.layers)
        linear = dims.hidden_size * (dims.linear.conv_size + 2 * dims.linear.value_size)
    widths = [
        dims.experts.num_active * dims.experts.intermediate_size + dims.experts.shared_size
        if dims.has_experts(layer)
        else dims.intermediate_size
        for layer in range(dims.num_layers)
    ]
    return RowCost(
        per_position=float(
            num_full * projections + (dims.num_layers - num_full) * linear + 3 * dims.hidden_size * sum(widths)
        ),
        per_pair=float(num_full * 2 * attention),
        per_label=float(dims.hidden_size * dims.vocab_size),
    )


def plan_best_fit(pieces: Sequence[Piece], row_lengths: Sequence[int], cost: RowCost) -> list[Row]:
    """Assign every piece to exactly one row, such that the rows cost little.

    Rows are planned once for each length as the longest, alone and with the shorter ones, and the cheapest plan is
    taken. With shorter ones there are two plans: all rows are opened with the longest, or each with the shortest that
    holds what it begins with (a few long samples, whose pairs of positions cost most, then make few long rows). Each
    row has the shortest of its plan's lengths that holds it; pieces of one group are neighbours in it.

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
    plans = [plan(pieces, choice) for choice in mixed]
    plans += [plan(pieces, [length]) for length in lengths if length > row_lengths[0]]
    plans += [plan(pieces, choice, is_tight=True) for choice in mixed if len(choice) > 1]
    best = min(plans, key=lambda rows: sum(cost.of(row.length) for row in rows))
    return sorted(best, key=lambda row: (row.length, row.items))


def deal_rows(costs: Sequence[float], num_ranks: int, *, most: int | None = None) -> list[list[int]]:
    """Give every row to a rank, the costliest first, each to the rank that has least so far.

    So no rank has more than the mean and one row: max <= sum / num_ranks + (1 - 1 / num_ranks) * max(costs).

    Returns:
        For each rank the numbers of its rows, ascending.
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap of the ranks that may get more
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        load, rank = loads[0]
        dealt[rank].append(row)
        if len(dealt[rank]) == most:
            heapq.heappop(loads)
        else:
            heapq.heapreplace(loads, (load + costs[row], rank))
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
