"""The prompt stream: permutations, epoch borders, exact resume."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.data.stream import EndOfEpochs, PromptStream
from mindrlhf.errors import UserError


def _drain(stream, count):
    drawn = []
    while True:
        try:
            drawn.append(stream.next(count))
        except EndOfEpochs:
            return drawn


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 90), st.integers(0, 2**40))
def test_each_epoch_draws_each_record_once_however_it_is_cut(num_records, num_epochs, count, seed):
    drawn = _drain(PromptStream(num_records, seed, num_epochs=num_epochs), count)
    flat = np.array([index for batch in drawn for index in batch])
    epochs = np.sort(flat.reshape(num_epochs, num_records), axis=1)
    assert np.array_equal(epochs, np.tile(np.arange(num_records), (num_epochs, 1)))
    assert all(len(batch) == count for batch in drawn[:-1])
    one_by_one = _drain(PromptStream(num_records, seed, num_epochs=num_epochs), 1)
    assert flat.tolist() == [index for (index,) in one_by_one]


@settings(max_examples=60)
@given(num_records=st.integers(1, 30), before=st.lists(st.integers(1, 50), max_size=6), seed=st.integers(0, 99))
def test_restored_stream_goes_on_exactly(num_records, before, seed):
    stream = PromptStream(num_records, seed)
    for count in before:
        stream.next(count)
    resumed = PromptStream(num_records, seed)
    resumed.next(7)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert resumed.state() == stream.state()
    assert resumed.next(2 * num_records + 1) == stream.next(2 * num_records + 1)


def test_order_differs_between_epochs_and_seeds_and_repeats_for_equal_seeds():
    stream = PromptStream(1000, seed=3)
    first, second = stream.next(1000), stream.next(1000)
    assert first != second
    assert first != sorted(first)
    assert PromptStream(1000, seed=3).next(1000) == first
    assert PromptStream(1000, seed=4).next(1000) != first


def test_order_is_pinned_since_checkpoints_depend_on_it():
    # By hand: rank of the raw PCG64 outputs of SeedSequence([seed, epoch]).
    for epoch, drawn in enumerate((PromptStream(6, 1).next(6), PromptStream(6, 1).next(12)[6:])):
        raw = np.random.PCG64(np.random.SeedSequence([1, epoch]))
        keys = [raw.random_raw() for _ in range(6)]
        assert drawn == sorted(range(6), key=keys.__getitem__)
    assert PromptStream(6, 1).next(12) == [2, 4, 5, 0, 3, 1, 5, 3, 0, 2, 1, 4]


def test_file_order_without_shuffle_and_short_last_draw():
    stream = PromptStream(3, seed=0, shuffle=False, num_epochs=2)
    assert (stream.num_remaining, stream.next(4), stream.epoch) == (6, [0, 1, 2, 0], 1)
    assert (stream.next(4), stream.num_remaining) == ([1, 2], 0)
    with pytest.raises(EndOfEpochs, match="all 2 epochs of 3 records"):
        stream.next(1)


def test_more_epochs_may_follow_a_restore():
    stream = PromptStream(2, seed=0, num_epochs=1)
    stream.next(2)
    longer = PromptStream(2, seed=0, num_epochs=2)
    longer.restore(stream.state())
    assert longer.next(5) == PromptStream(2, seed=0).next(4)[2:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "seed was 2 in the checkpoint and is now 1"),
        ({"num_records": 6}, "num_records was 6"),
        ({"shuffle": False}, "shuffle was False"),
        ({"position": 5}, "position 5 is not a place"),
        ({"epoch": None}, "epoch None"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_state_of_another_run_is_refused(change, message):
    stream = PromptStream(5, seed=1)
    with pytest.raises(UserError, match=message):
        stream.restore({**stream.state(), **change})
