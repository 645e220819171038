"""Blocks of rows: what ranks get and give fits together, whatever the layout."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.parallel.layout import Layout
from mindrlhf.parallel.rows import block_of, own_rows, place_rows

LAYOUTS = st.builds(
    Layout,
    data_parallel=st.integers(1, 4),
    model_parallel=st.integers(1, 3),
    pipeline_stage=st.integers(1, 3),
    context_parallel=st.integers(1, 2),
)


@settings(max_examples=40, deadline=None)
@given(layout=LAYOUTS, rows=st.integers(1, 3))
def test_placed_rows_of_one_rank_of_each_copy_make_the_batch(layout, rows):
    whole = np.arange(layout.data_parallel * rows * 5, dtype=np.float32).reshape(-1, 5) + 1
    placed = {}
    for rank in range(layout.world_size):
        own = whole[block_of(layout, rank, len(whole))]
        assert own.shape == (rows, 5)
        copy = layout.coordinates(rank).data
        # All ranks of a copy have the same rows.
        np.testing.assert_array_equal(
            placed.setdefault(copy, place_rows(own, layout, rank)), place_rows(own, layout, rank)
        )
    np.testing.assert_array_equal(sum(placed.values()), whole)


@settings(max_examples=40, deadline=None)
@given(layout=LAYOUTS, rows=st.integers(1, 2), num_pieces=st.integers(1, 3))
def test_rows_come_back_in_order_from_pieces(layout, rows, num_pieces):
    """A graph cuts every rank's rows into pieces, and each piece holds those of all ranks."""
    own = np.arange(layout.data_parallel * num_pieces * rows).reshape(layout.data_parallel, num_pieces, rows)
    pieces = [own[:, piece].reshape(-1, 1) for piece in range(num_pieces)]
    for rank in range(layout.world_size):
        expected = own[layout.coordinates(rank).data].reshape(-1, 1)
        np.testing.assert_array_equal(own_rows(pieces, layout, rank), expected)
