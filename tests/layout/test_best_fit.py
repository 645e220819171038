"""Packing by cost: every sample once, no row too long, prefixes counted, and the ranks balanced."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from mindrlhf.data.packing import Row, plan_rows
from mindrlhf.layout.best_fit import Piece, largest_subset, reachable
from mindrlhf.layout.packing import RowCost, cut, deal_rows, micro_batch_sizes, plan_best_fit, row_cost
from mindrlhf.specs import find_spec

ROW_LENGTHS = (24, 40, 96)
COST = RowCost(per_position=1.0, per_pair=0.01)


@st.composite
def piece_lists(draw):
    """Samples of groups, each with one prefix; a piece and its prefix fit the longest row."""
    prefixes = draw(st.lists(st.integers(0, 46), min_size=1, max_size=6))
    groups = draw(st.lists(st.integers(0, len(prefixes) - 1), min_size=1, max_size=40))
    return [Piece(draw(st.integers(1, 50)), prefixes[group], group) for group in groups]


def used(row: Row, pieces: list[Piece]) -> int:
    prefixes = {pieces[item].group: pieces[item].prefix_size for item in row.items}
    return sum(pieces[item].size for item in row.items) + sum(prefixes.values())


@given(pieces=piece_lists())
def test_every_sample_is_in_one_row_that_holds_it(pieces):
    rows = plan_best_fit(pieces, ROW_LENGTHS, COST)
    assert sorted(item for row in rows for item in row.items) == list(range(len(pieces)))
    for row in rows:
        # The shortest length that holds it.
        assert row.length == min(length for length in ROW_LENGTHS if length >= used(row, pieces))
        groups = [pieces[item].group for item in row.items]
        assert len([group for group, _ in itertools.groupby(groups)]) == len(set(groups)), "a group is in one piece"
    assert [row.length for row in rows] == sorted(row.length for row in rows)
    assert plan_best_fit(pieces, ROW_LENGTHS, COST) == rows


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_rows_are_few(sizes):
    """Of pieces without prefixes, in rows of one length: no two rows could be one, so fewer than twice the least."""
    pieces = [Piece(size, group=number) for number, size in enumerate(sizes)]
    rows = plan_best_fit(pieces, (60,), COST)
    contents = sorted(used(row, pieces) for row in rows)
    assert all(one + other > 60 for one, other in itertools.combinations(contents[:2], 2))
    assert len(rows) <= max(1, 2 * -(-sum(sizes) // 60) - 1)


@given(pieces=piece_lists())
def test_more_lengths_cost_no_more(pieces):
    def total(row_lengths):
        return sum(COST.of(row.length) for row in plan_best_fit(pieces, row_lengths, COST))

    assert total((*ROW_LENGTHS[:-1], 96)) <= total((96,))


def test_by_hand():
    # Two groups of 4 + 3 x 2 = 10 places: alone in a row of 10, and in rows of 8 with the prefix repeated.
    pieces = [Piece(2, 4, 0), Piece(2, 4, 1), Piece(2, 4, 0), Piece(2, 4, 1), Piece(2, 4, 0), Piece(2, 4, 1)]
    assert plan_best_fit(pieces, (10,), COST) == [Row(10, (0, 2, 4)), Row(10, (1, 3, 5))]
    assert plan_best_fit(pieces, (8,), COST) == [Row(8, (0, 2)), Row(8, (1, 3)), Row(8, (4,)), Row(8, (5,))]
    # A row that nothing but a part of a group fits takes the part.
    pieces = [Piece(13, 0, 0), *[Piece(2, 1, 1)] * 6]
    assert plan_best_fit(pieces, (16,), COST) == [Row(16, (0, 1)), Row(16, (2, 3, 4, 5, 6))]
    # An emptiest row is closed where others have room, or shortened.
    pieces = [Piece(size, group=number) for number, size in enumerate((9, 9, 4, 4))]
    assert plan_best_fit(pieces, (5, 13), COST) == [Row(13, (0, 2)), Row(13, (1, 3))]
    assert plan_best_fit([], (8,), COST) == []


def test_a_long_sample_makes_no_other_row_long():
    # 9 pieces of 4 and one of 30: filled as far as they can be, rows of 32 are 2, for 2 x (32 + 1024) with the cost
    # below. One of 32 with the long piece and rows of two small ones cost 32 + 1024 + 5 x (8 + 64).
    pieces = [Piece(30, group=0), *[Piece(4, group=number) for number in range(1, 10)]]
    rows = plan_best_fit(pieces, (8, 32), RowCost(1.0, 1.0))
    assert [(row.length, row.items) for row in rows] == [
        (8, (1, 2)), (8, (3, 4)), (8, (5, 6)), (8, (7, 8)), (8, (9,)), (32, (0,))
    ]  # fmt: skip
    # Room that the long row has anyway is filled.
    rows = plan_best_fit([Piece(28, group=0), *pieces[1:]], (8, 32), RowCost(1.0, 1.0))
    assert [row.items for row in rows] == [(2, 3), (4, 5), (6, 7), (8, 9), (0, 1)]


@pytest.mark.parametrize("row_lengths", [(1024, 4096, 16384), (2048, 8192, 32768), (1024, 2048, 4096, 8192, 16384)])
def test_long_tails_cost_little_more_than_the_least(row_lengths):
    """128 samples, log-normal (median 1,000 tokens, sigma 1), of a model of 7B parameters: Qwen2.5's dimensions.

    No plan costs less than the bound: a place for a token costs no less than in the shortest row that its sample fits.
    """
    positions = 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)
    cost = RowCost(per_position=float(positions), per_pair=float(28 * 2 * 3584))
    for seed in range(5):
        lengths = np.random.default_rng(seed).lognormal(np.log(900), 1.0, 128).astype(int) + 100
        lengths = np.minimum(lengths, row_lengths[-1]).tolist()
        rows = plan_best_fit([Piece(size, group=number) for number, size in enumerate(lengths)], row_lengths, cost)
        shortest = [min(length for length in row_lengths if length >= size) for size in lengths]
        bound = sum(size * cost.of(length) / length for size, length in zip(lengths, shortest))
        assert bound <= sum(cost.of(row.length) for row in rows) < 1.15 * bound


def test_a_sample_that_fits_no_row_is_named():
    with pytest.raises(ValueError, match="sample 1 takes 97 tokens"):
        plan_best_fit([Piece(3), Piece(50, 47, 1)], ROW_LENGTHS, COST)


def test_a_length_is_chosen_by_cost():
    pieces = [Piece(8, group=number) for number in range(8)]
    linear, quadratic = RowCost(1.0), RowCost(0.0, 1.0)
    assert {row.length for row in plan_best_fit(pieces, (8, 64), quadratic)} == {8}
    # A prefix that a long row has once.
    sharing = [Piece(1, 7, 0) for _ in range(8)]
    assert plan_best_fit(sharing, (8, 15), linear) == [Row(15, tuple(range(8)))]


@given(sizes=st.lists(st.integers(1, 12), max_size=8), room=st.integers(0, 40))
def test_the_largest_subset_is_that_of_all_subsets(sizes, room):
    found = largest_subset(sizes, room)
    sums = [sum(one) for count in range(len(sizes) + 1) for one in itertools.combinations(sizes, count)]
    expected = max(total for total in sums if total <= room)
    assert (
        sum(sizes[number] for number in found)
        == (reachable(sizes) & (2 ** (room + 1) - 1)).bit_length() - 1
        == expected
    )
    assert len(set(found)) == len(found)


@given(costs=st.lists(st.floats(0.5, 100), max_size=40), num_ranks=st.integers(1, 6))
def test_ranks_are_balanced(costs, num_ranks):
    """Graham's bound; no division can be below the mean or the largest row."""
    dealt = deal_rows(costs, num_ranks)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(costs)))
    loads = [sum(costs[row] for row in rows) for rows in dealt]
    largest = max(costs, default=0.0)
    lower_bound = max(sum(costs) / num_ranks, largest)
    assert max(loads) <= sum(costs) / num_ranks + (1 - 1 / num_ranks) * largest + 1e-9
    # Twice the best at the very most, which both bounds together give.
    assert max(loads) <= 2 * lower_bound + 1e-9


def test_ranks_in_step_get_as_many_rows():
    assert deal_rows([9.0, 1.0, 1.0, 1.0], 2) == [[0], [1, 2, 3]]
    assert deal_rows([9.0, 1.0, 1.0, 1.0], 2, most=2) == [[0, 3], [1, 2]]


@given(num_rows=st.integers(0, 200), most=st.integers(1, 64))
def test_rows_are_cut_without_padding(num_rows, most):
    sizes = micro_batch_sizes(most)
    assert sizes[0] == most and sizes[-1] == 1 and len(sizes) <= 4
    assert sum(cut(num_rows, sizes)) == num_rows
    assert set(cut(num_rows, sizes)) <= set(sizes)


def test_the_cost_of_a_row_counts_multiplications():
    sizes = {"hidden_size": 6, "intermediate_size": 7, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = tiny_model(num_hidden_layers=2, vocab_size=11, **sizes)
    cost = row_cost(find_spec(config).dims(config))
    # Queries and their output 6 x 6 each, keys and values 6 x 2 each, three matrices 6 x 7; two layers.
    assert cost.per_position == 2 * (2 * 36 + 2 * 12 + 3 * 42)
    # Scores and weighted values: 3 heads of 2 channels each.
    assert cost.per_pair == 2 * (6 + 6)
    assert cost.per_label == 66
    assert cost.of(4, 3) == 4 * cost.per_position + 16 * cost.per_pair + 3 * 66
    linear = {"key_heads": 1, "value_heads": 2, "key_head_dim": 5, "value_head_dim": 4}
    linear = {f"linear_num_{key}" if key.endswith("s") else f"linear_{key}": size for key, size in linear.items()}
    hybrid = {**config, **linear, "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 2, "partial_rotary_factor": 1.0}
    hybrid["full_attention_interval"] = 2
    cost = row_cost(find_spec(hybrid).dims(hybrid))
    # Of one layer, which has gates as wide as its queries; of the other 2 x 5 + 8 channels, gates and outputs of 8.
    assert cost.per_position == 6 * (3 * 6 + 2 * 2) + 6 * (18 + 2 * 8) + 2 * 3 * 42
    assert cost.per_pair == 6 + 6


@given(sizes=st.lists(st.integers(1, 60), max_size=80), lengths=st.sampled_from([(60,), (20, 60), (7, 33, 60)]))
def test_first_fit_is_that_of_a_scan(sizes, lengths):
    rows = {length: [] for length in lengths}
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        length = min(length for length in lengths if length >= sizes[item])
        room = next((row for row in rows[length] if sum(sizes[one] for one in row) + sizes[item] <= length), None)
        room.append(item) if room is not None else rows[length].append([item])
    expected = [Row(length, tuple(row)) for length in lengths for row in rows[length]]
    assert plan_rows(sizes, lengths) == expected


@given(
    costs=st.lists(st.sampled_from([1.0, 2.0, 2.5, 7.25]), max_size=60),
    num_ranks=st.integers(1, 9),
    is_even=st.booleans(),
)
def test_rows_are_dealt_as_by_a_scan(costs, num_ranks, is_even):
    most = -(-len(costs) // num_ranks) or 1 if is_even else None
    loads, dealt = [0.0] * num_ranks, [[] for _ in range(num_ranks)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        rank = min(
            (rank for rank in range(num_ranks) if len(dealt[rank]) != most), key=lambda rank: (loads[rank], rank)
        )
        loads[rank] += costs[row]
        dealt[rank].append(row)
    assert deal_rows(costs, num_ranks, most=most) == [sorted(rows) for rows in dealt]
