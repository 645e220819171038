"""Prompts that rest: what is drawn, and that a resumed run draws the same."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.training.loop.difficulty import DifficultyStream

RATES = st.sampled_from([0.0, 0.25, 0.5, 1.0, float("nan")])


def stream(num_records=10, seed=3, rest=1):
    return DifficultyStream(num_records, seed, True, rest)


def test_without_notes_it_is_the_plain_order():
    assert stream().next(37) == PromptStream(10, 3).next(37)


def test_what_is_too_easy_or_hopeless_is_left_out_for_so_many_epochs():
    one = stream(6, rest=2)
    first = one.next(6)
    one.note(first, [0.0, 0.0, 0.5, 0.99, 1.0, float("nan")])
    # Noted when the second epoch had begun: it is whole.
    assert sorted(one.next(6)) == list(range(6))
    assert one.epoch == 2 and one.resting == sorted([first[0], first[1], first[4]])
    kept = sorted([first[2], first[3], first[5]])
    assert sorted(one.next(3)) == sorted(one.next(3)) == kept
    assert sorted(one.next(6)) == list(range(6)), "they are tried again"


def test_a_prompt_is_judged_by_its_last_samples():
    one = stream(4)
    one.note([0], [0.0])
    one.note([0], [0.5])
    one.next(4)
    assert one.resting == []


def test_where_all_would_rest_none_does():
    one = stream(3)
    one.note([0, 1, 2], [1.0, 0.0, 1.0])
    one.next(3)
    assert (one.resting, sorted(one.next(3))) == ([], [0, 1, 2])


@settings(max_examples=80, deadline=None)
@given(
    num_records=st.integers(1, 12),
    steps=st.lists(st.tuples(st.integers(1, 9), st.lists(RATES, min_size=9, max_size=9)), max_size=8),
    rest=st.integers(1, 3),
)
def test_a_restored_stream_goes_on_exactly(num_records, steps, rest):
    one = stream(num_records, rest=rest)
    for count, rates in steps:
        drawn = one.next(count)
        one.note(drawn, rates)
        other = stream(num_records, rest=rest)
        other.next(5)
        other.restore(json.loads(json.dumps(one.state())))
        assert other.state() == one.state()
    other = stream(num_records, rest=rest)
    other.restore(json.loads(json.dumps(one.state())))
    assert other.next(5 * num_records) == one.next(5 * num_records)
    assert other.state() == one.state()


def test_a_checkpoint_of_another_order_is_refused():
    with pytest.raises(UserError, match="num_records was 9"):
        stream().restore(stream(9).state())
    with pytest.raises(UserError, match="position 10 is not a place"):
        stream().restore(stream().state() | {"position": 10})


def test_a_checkpoint_of_a_run_that_rested_none_is_gone_on_with():
    plain = PromptStream(10, 3)
    plain.next(4)
    one = stream()
    one.restore(plain.state())
    assert one.next(20) == plain.next(20)
