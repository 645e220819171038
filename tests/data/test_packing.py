"""Packing: every sequence once, in rows that hold it, with labels and masks that a naive reading confirms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.data.packing import (
    Row,
    TokenSequence,
    choose_row_length,
    fill_rows,
    plan_rows,
)
from mindrlhf.errors import UserError

ROW_LENGTHS = (8, 16, 40)


def make_sequence(prompt_length: int, response_length: int, first_token: int) -> TokenSequence:
    """A sequence whose tokens count up from ``first_token``; the values of its response are token + 0.5."""
    ids = np.arange(first_token, first_token + prompt_length + response_length, dtype=np.int32)
    response = ids[prompt_length:]
    return TokenSequence(ids[:prompt_length], response, {"advantages": (response + 0.5).astype(np.float32)})


@st.composite
def sequence_lists(draw):
    """Up to 12 sequences of at most 40 tokens, all tokens of all of them different and above 0."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12))
    return [make_sequence(prompt, response, 1000 * (i + 1)) for i, (prompt, response) in enumerate(shapes)]


def test_first_fit_decreasing_by_hand():
    # In order of length: 6 (index 1), 5 (0), 4 (3), 3 (2), 2 (4) into rows of 10.
    assert plan_rows([5, 6, 3, 4, 2], (10,)) == [Row(10, (1, 3)), Row(10, (0, 2, 4))]
    assert plan_rows([5, 6, 3], (10,), pack=False) == [Row(10, (0,)), Row(10, (1,)), Row(10, (2,))]
    assert plan_rows([4, 4, 4], (8,)) == [Row(8, (0, 1)), Row(8, (2,))]
    assert plan_rows([], (8,)) == []


def test_a_sequence_longer_than_every_row_is_an_error():
    with pytest.raises(ValueError, match="sequence 1 has 41 tokens"):
        plan_rows([3, 41], ROW_LENGTHS)


@given(sequences=sequence_lists(), spare=st.integers(0, 3), pack=st.booleans())
def test_rows_read_back_naively(sequences, spare, pack):
    rows = plan_rows([sequence.num_tokens for sequence in sequences], (40,), pack=pack)
    packed = fill_rows(sequences, rows, len(rows) + spare)
    assert packed.num_rows == len(rows) + spare
    assert packed.input_ids.dtype == packed.segment_ids.dtype == packed.labels.dtype == np.int32
    assert packed.mask.dtype == packed.tokens["advantages"].dtype == np.float32
    seen = []
    for ids, segments, labels, mask, values in zip(
        packed.input_ids.tolist(),
        packed.segment_ids.tolist(),
        packed.labels.tolist(),
        packed.mask.tolist(),
        packed.tokens["advantages"].tolist(),
    ):
        tokens = [token for token in ids if token]
        assert [bool(token) for token in ids] == [bool(segment) for segment in segments]
        for position, token in enumerate(ids):
            sequence = sequences[token // 1000 - 1] if token else None
            is_last = token and token == int(np.concatenate([sequence.prompt_ids, sequence.response_ids])[-1])
            following = ids[position + 1] if token and not is_last else None
            assert labels[position] == (following or 0)
            # A label counts when it is a response token of the same sequence.
            counts = following is not None and following in sequence.response_ids
            assert mask[position] == counts
            assert values[position] == (following + 0.5 if counts else 0.0)
            if following is not None:
                assert segments[position] == segments[position + 1]
        order = [segment for position, segment in enumerate(segments) if segment and segment not in segments[:position]]
        assert order == list(range(1, len(order) + 1))
        seen += tokens
    everything = np.concatenate([np.r_[sequence.prompt_ids, sequence.response_ids] for sequence in sequences])
    assert sorted(seen) == sorted(everything.tolist())
    assert packed.mask.sum() == sum(len(sequence.response_ids) for sequence in sequences)


def test_a_packed_row_by_hand():
    sequences = [make_sequence(2, 2, 10), make_sequence(1, 2, 20)]
    packed = fill_rows(sequences, [Row(8, (0, 1))], 2)
    np.testing.assert_array_equal(packed.input_ids, [[10, 11, 12, 13, 20, 21, 22, 0], [0] * 8])
    np.testing.assert_array_equal(packed.segment_ids, [[1, 1, 1, 1, 2, 2, 2, 0], [0] * 8])
    np.testing.assert_array_equal(packed.labels, [[11, 12, 13, 0, 21, 22, 0, 0], [0] * 8])
    np.testing.assert_array_equal(packed.mask, [[0, 1, 1, 0, 1, 1, 0, 0], [0] * 8])
    np.testing.assert_array_equal(packed.tokens["advantages"], [[0, 12.5, 13.5, 0, 21.5, 22.5, 0, 0], [0] * 8])


def test_row_lengths_are_chosen_or_checked():
    for device, multiple in (("ascend", 16), ("cpu", 8)):
        assert choose_row_length((), 1, "a sample", device) == (multiple,)
        assert choose_row_length((), multiple, "a sample", device) == (multiple,)
        assert choose_row_length((), multiple + 1, "a sample", device) == (2 * multiple,)
    assert choose_row_length((64, 32, 64), 33, "a sample", "cpu") == (32, 64)
    with pytest.raises(UserError, match=r"sequence_lengths ends at 64, but a sample takes 65 tokens: add 80"):
        choose_row_length((32, 64), 65, "a sample", "ascend")


def test_lengths_for_best_fit_hold_two_of_the_longest_sample_and_a_little_less():
    assert choose_row_length((), 85, "", "cpu", is_fitted=True) == (144, 176)
    assert choose_row_length((), 128, "", "cpu", is_fitted=True) == (224, 256)
    assert choose_row_length((), 5, "", "cpu", is_fitted=True) == (16,)
    assert choose_row_length((), 2048, "", "ascend", is_fitted=True) == (3584, 4096)
    assert choose_row_length((64,), 30, "", "cpu", is_fitted=True) == (64,)


def test_lengths_for_best_fit_of_long_samples_hold_one_and_a_quarter():
    assert choose_row_length((), 2049, "", "ascend", is_fitted=True) == (528, 2064)
    assert choose_row_length((), 16384, "", "cpu", is_fitted=True) == (4096, 16384)
