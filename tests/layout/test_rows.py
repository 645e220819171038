"""Blocks of rows: what ranks get and give fits together, whatever the layout."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.layout.layout import Layout
from mindrlhf.layout.rows import own_rows, place_rows

LAYOUTS = st.builds(
    Layout,
    data_parallel=st.integers(1, 4),
    model_parallel=st.integers(1, 3),
    pipeline_stage=st.integers(1, 3),
    context_parallel=st.integers(1, 2),
)


@settings(max_examples=40, deadline=None)
@given(layout=LAYOUTS, rows=st.integers(1, 3), num_pieces=st.integers(1, 3))
def test_placed_rows_of_one_rank_of_each_copy_make_the_batch(layout, rows, num_pieces):
    """A graph cuts its rows into pieces, and each piece into one block for each copy."""
    whole = np.arange(num_pieces * layout.data_parallel * rows * 5, dtype=np.float32).reshape(-1, 5) + 1
    blocks = whole.reshape(num_pieces, layout.data_parallel, rows, 5)
    placed = {}
    for rank in range(layout.world_size):
        copy = layout.coordinates(rank).data
        own = blocks[:, copy].reshape(-1, 5)
        one = place_rows(own, layout, rank, num_pieces)
        # All ranks of a copy have the same rows.
        np.testing.assert_array_equal(placed.setdefault(copy, one), one)
        pieces = np.split(one, num_pieces)
        np.testing.assert_array_equal(own_rows(pieces, layout, rank), own)
    np.testing.assert_array_equal(sum(placed.values()), whole)


def test_rows_of_the_second_copy_lie_in_the_second_half_of_each_piece():
    layout = Layout(data_parallel=2)
    own = np.array([[1], [2], [3], [4]])
    np.testing.assert_array_equal(place_rows(own, layout, 1, 2)[:, 0], [0, 0, 1, 2, 0, 0, 3, 4])
    np.testing.assert_array_equal(place_rows(own, layout, 1, 1)[:, 0], [0, 0, 0, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(place_rows(own, layout, 0, 4)[:, 0], [1, 0, 2, 0, 3, 0, 4, 0])


@settings(max_examples=40, deadline=None)
@given(layout=LAYOUTS, rows=st.integers(1, 2), num_pieces=st.integers(1, 3))
def test_rows_come_back_in_order_from_pieces(layout, rows, num_pieces):
    """A graph cuts every rank's rows into pieces, and each piece holds those of all ranks."""
    own = np.arange(layout.data_parallel * num_pieces * rows).reshape(layout.data_parallel, num_pieces, rows)
    pieces = [own[:, piece].reshape(-1, 1) for piece in range(num_pieces)]
    for rank in range(layout.world_size):
        expected = own[layout.coordinates(rank).data].reshape(-1, 1)
        np.testing.assert_array_equal(own_rows(pieces, layout, rank), expected)
