"""The items of each step of an epoch: all of them once, in an order that is the same everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.stream import PromptStream


@given(num_items=st.integers(1, 40), per_step=st.integers(1, 12), seed=st.integers(0, 9), shuffle=st.booleans())
def test_every_epoch_has_every_item_once(num_items, per_step, seed, shuffle):
    order = EpochSteps(num_items, per_step, seed, shuffle)
    for epoch in (1, 0):  # in any order
        steps = [order.items(epoch * order.per_epoch + index) for index in range(order.per_epoch)]
        assert [len(step) for step in steps[:-1]] == [per_step] * (order.per_epoch - 1) and 0 < len(
            steps[-1]
        ) <= per_step
        assert sorted(np.concatenate(steps)) == list(range(num_items))
        if not shuffle:
            assert np.concatenate(steps).tolist() == list(range(num_items))


def test_the_order_is_that_of_a_prompt_stream():
    """Which is pinned number by number, since a resumed run may have another NumPy."""
    order, stream = EpochSteps(10, 4, 3, shuffle=True), PromptStream(10, seed=3)
    for epoch in range(3):
        drawn = np.concatenate([order.items(3 * epoch + index) for index in range(3)])
        assert drawn.tolist() == stream.next(10)


@pytest.mark.parametrize(("epochs", "max_steps", "expected"), [(2, 0, 6), (2, 5, 5), (2, 7, 6), (1, 3, 3)])
def test_steps_end_with_the_epochs_or_earlier(epochs, max_steps, expected):
    assert EpochSteps(10, 4, 0, shuffle=True).num_steps(epochs, max_steps) == expected
