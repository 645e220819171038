"""Blocks of rows: what ranks get and give fits together, whatever the layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.config.training import ParallelSection
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.rows import own_rows, place_rows, updates_return_outputs

LAYOUTS = st.builds(
    Layout,
    data_parallel=st.integers(1, 4),
    model_parallel=st.integers(1, 3),
    pipeline_stage=st.integers(1, 3),
    context_parallel=st.integers(1, 2),
)


@settings(max_examples=40)
@given(layout=LAYOUTS, rows=st.integers(1, 3), num_micro_batches=st.integers(1, 3))
def test_placed_rows_of_one_rank_of_each_replica_make_the_batch(layout, rows, num_micro_batches):
    """A graph splits its rows into micro-batches, and each of them into one block for each replica."""
    whole = np.arange(num_micro_batches * layout.data_parallel * rows * 5, dtype=np.float32).reshape(-1, 5) + 1
    blocks = whole.reshape(num_micro_batches, layout.data_parallel, rows, 5)
    placed = {}
    for rank in range(layout.world_size):
        replica = layout.coordinates(rank).data
        own = blocks[:, replica].reshape(-1, 5)
        one = place_rows(own, layout, rank, num_micro_batches)
        # All ranks of a replica have the same rows.
        np.testing.assert_array_equal(placed.setdefault(replica, one), one)
        micro_batches = np.split(one, num_micro_batches)
        np.testing.assert_array_equal(own_rows(micro_batches, layout, rank), own)
    np.testing.assert_array_equal(sum(placed.values()), whole)


def test_rows_of_the_second_replica_lie_in_the_second_half_of_each_micro_batch():
    layout = Layout(data_parallel=2)
    own = np.array([[1], [2], [3], [4]])
    np.testing.assert_array_equal(place_rows(own, layout, 1, 2)[:, 0], [0, 0, 1, 2, 0, 0, 3, 4])
    np.testing.assert_array_equal(place_rows(own, layout, 1, 1)[:, 0], [0, 0, 0, 0, 1, 2, 3, 4])
    np.testing.assert_array_equal(place_rows(own, layout, 0, 4)[:, 0], [1, 0, 2, 0, 3, 0, 4, 0])


@settings(max_examples=40)
@given(layout=LAYOUTS, rows=st.integers(1, 2), num_micro_batches=st.integers(1, 3))
def test_rows_come_back_in_order_from_micro_batches(layout, rows, num_micro_batches):
    """A graph splits every rank's rows into micro-batches, and each of them holds those of all ranks."""
    shape = (layout.data_parallel, num_micro_batches, rows)
    own = np.arange(np.prod(shape)).reshape(shape)
    micro_batches = [own[:, index].reshape(-1, 1) for index in range(num_micro_batches)]
    for rank in range(layout.world_size):
        expected = own[layout.coordinates(rank).data].reshape(-1, 1)
        np.testing.assert_array_equal(own_rows(micro_batches, layout, rank), expected)


@pytest.mark.parametrize(
    "keys, returns",
    [
        ({"context_parallel": 2, "model_parallel": 2}, True),
        ({"expert_parallel": 2}, True),
        ({"pipeline_stage": 2, "micro_batch_num": 4, "context_parallel": 2, "expert_parallel": 2}, True),
        ({"micro_batch_num": 2}, False),
    ],
)
def test_updates_return_outputs_but_where_gradients_are_accumulated_without_a_pipeline(keys, returns):
    assert updates_return_outputs(ParallelSection(data_parallel=2, **keys)) is returns
