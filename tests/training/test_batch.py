"""Batches: micro-batches that divide among the ranks, shares that travel, and results that find their way back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.data.packing import TokenSequence, plan_rows
from mindrlhf.training.batch import RowOptions, batch_of_rows, in_order, make_batch

FIELDS = ("input_ids", "segment_ids", "labels", "mask")


def make_sequences(shapes) -> list[TokenSequence]:
    """Sequences whose tokens all differ: sequence i counts up from 1000 (i + 1)."""
    sequences = []
    for index, (prompt_length, response_length) in enumerate(shapes):
        ids = 1000 * (index + 1) + np.arange(prompt_length + response_length, dtype=np.int32)
        advantages = np.full(response_length, index - 0.5, np.float32)
        sequences.append(TokenSequence(ids[:prompt_length], ids[prompt_length:], {"advantages": advantages}))
    return sequences


shape_lists = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 20)), min_size=1, max_size=20)
options = st.builds(
    RowOptions,
    row_lengths=st.sampled_from([(30,), (8, 30), (8, 16, 48)]),
    rows_per_micro_batch=st.integers(1, 6),
    num_ranks=st.integers(1, 5),
    pack=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(shapes=shape_lists, options=options)
def test_shares_are_equal_in_number_and_hold_every_token_once(shapes, options):
    sequences = make_sequences(shapes)
    batch = make_batch(sequences, options)
    assert len(batch.micro_batches) % options.num_ranks == 0
    assert batch.num_tokens == sum(response for _, response in shapes)
    tokens, num_counted = [], 0
    for rank in range(options.num_ranks):
        share = batch.share(rank, options.num_ranks)
        micro_batches = share.micro_batches
        assert share.num_tokens == batch.num_tokens
        assert len(micro_batches) == len(batch.micro_batches) // options.num_ranks
        for rows in micro_batches:
            assert rows.input_ids.shape[0] == options.rows_per_micro_batch
            assert rows.input_ids.shape[1] in options.row_lengths
            tokens += rows.input_ids[rows.segment_ids > 0].tolist()
            num_counted += int(rows.mask.sum())
    expected = [token for s in sequences for token in (*s.prompt_ids.tolist(), *s.response_ids.tolist())]
    assert sorted(tokens) == expected
    assert num_counted == batch.num_tokens


@settings(max_examples=100, deadline=None)
@given(shapes=shape_lists, options=options)
def test_collect_inverts_placement(shapes, options):
    """What each position predicts is its label: collected, the labels are the responses."""
    sequences = make_sequences(shapes)
    batch = make_batch(sequences, options)
    shares = [batch.share(rank, options.num_ranks).micro_batches for rank in range(options.num_ranks)]
    collected = batch.collect([[rows.labels * rows.mask for rows in share] for share in shares])
    assert [response.tolist() for response in collected] == [s.response_ids.tolist() for s in sequences]
    advantages = [[rows.tokens["advantages"] for rows in share] for share in shares]
    for response, sequence in zip(batch.collect(advantages), sequences):
        np.testing.assert_array_equal(response, sequence.values["advantages"])
    # Laid out again from the responses, they are where packing put them.
    for share, spread in zip(advantages, batch.spread(batch.collect(advantages), len(shares)), strict=True):
        for array, expected in zip(spread.arrays, share, strict=True):
            np.testing.assert_array_equal(array, expected)


@settings(max_examples=50, deadline=None)
@given(shapes=shape_lists, options=options)
def test_shares_come_back_as_they_were_cut(shapes, options):
    batch = make_batch(make_sequences(shapes), options)
    for rank in range(options.num_ranks):
        micro_batches = batch.share(rank, options.num_ranks).micro_batches
        for ours, theirs in zip(micro_batches, batch.micro_batches[rank :: options.num_ranks], strict=True):
            for field in FIELDS:
                np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
            assert ours.tokens.keys() == theirs.tokens.keys() == {"advantages"}
            ours.tokens["more"] = ours.mask  # as a rank does, which must not show in the batch
    assert all(rows.tokens.keys() == {"advantages"} for rows in batch.micro_batches)


@settings(max_examples=50, deadline=None)
@given(shapes=shape_lists, options=options)
def test_shares_in_order_are_the_batch(shapes, options):
    batch = make_batch(make_sequences(shapes), options)
    found = in_order([batch.share(rank, options.num_ranks).micro_batches for rank in range(options.num_ranks)])
    for ours, theirs in zip(found, batch.micro_batches, strict=True):
        assert ours.input_ids is theirs.input_ids


def test_padding_micro_batches_count_nothing():
    batch = make_batch(make_sequences([(2, 3)]), RowOptions((16,), 2, 4, True))
    assert len(batch.micro_batches) == 4
    for rows in batch.micro_batches[1:]:
        assert not any(getattr(rows, field).any() for field in FIELDS)
        assert rows.input_ids.shape == (2, 16)
        assert not rows.tokens["advantages"].any()
    # An array shared with the real rows would let one rank's results overwrite another's.
    assert not np.shares_memory(batch.micro_batches[1].mask, batch.micro_batches[0].mask)


def test_a_batch_of_some_rows_counts_only_these():
    sequences = make_sequences([(1, 5), (2, 9), (1, 3), (4, 12)])
    options = RowOptions((16,), 1, 1, False)
    rows = plan_rows([s.num_tokens for s in sequences], options.row_lengths, pack=False)
    batch = batch_of_rows(sequences, [rows[3], rows[1]], options)
    assert batch.num_tokens == 12 + 9
    collected = batch.collect([[rows.labels for rows in batch.micro_batches]])
    # In the order of the sequences, not of the rows.
    assert [response.tolist() for response in collected] == [
        sequences[1].response_ids.tolist(),
        sequences[3].response_ids.tolist(),
    ]


def test_rows_of_every_length_make_micro_batches_of_their_own():
    batch = make_batch(make_sequences([(1, 2), (1, 20), (1, 3), (1, 21)]), RowOptions((8, 24), 4, 1, False))
    assert [rows.input_ids.shape for rows in batch.micro_batches] == [(4, 8), (4, 24)]
    assert batch.placed == ((0, 0, 0, 2), (1, 0, 0, 20), (0, 1, 0, 3), (1, 1, 0, 21))


def test_a_sequence_longer_than_the_rows_is_an_error():
    with pytest.raises(ValueError, match="sequence 0 has 20 tokens"):
        make_batch(make_sequences([(10, 10)]), RowOptions((16,), 1, 1, True))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), shapes=shape_lists, first=options, second=options)
def test_tokens_of_tools_carry_nothing_however_a_batch_is_cut(data, shapes, first, second):
    """Mask and values of every token of every sequence, found again by its id, are the same under any cutting."""
    sequences, expected = [], {}
    for plain in make_sequences(shapes):
        count = len(plain.response_ids)
        # A response begins with a token of the model.
        chosen = np.array([True, *data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))])
        values = np.arange(1, chosen.sum() + 1, dtype=np.float32)
        sequences.append(TokenSequence(plain.prompt_ids, plain.response_ids, {"logprobs": values}, chosen))
        expected |= dict(zip(plain.response_ids[chosen].tolist(), values.tolist()))
    for cut in (first, second):
        batch = make_batch(sequences, cut)
        assert batch.num_tokens == len(expected)
        found, num_tokens = {}, 0
        for rows in batch.micro_batches:
            assert not rows.tokens["logprobs"][rows.mask == 0].any()
            found |= dict(zip(rows.labels[rows.mask > 0].tolist(), rows.tokens["logprobs"][rows.mask > 0].tolist()))
            num_tokens += int((rows.segment_ids > 0).sum())
        assert found == expected
        assert num_tokens == sum(sequence.num_tokens for sequence in sequences), "tools' tokens are still read"
        collected = batch.collect(
            [[rows.labels for rows in batch.micro_batches[rank :: cut.num_ranks]] for rank in range(cut.num_ranks)]
        )
        assert [part.tolist() for part in collected] == [s.response_ids[s.is_generated].tolist() for s in sequences]
        spread = batch.spread([part + 0.5 for part in collected], cut.num_ranks)
        for micro_batch, rows in enumerate(batch.micro_batches):
            array = spread[micro_batch % cut.num_ranks].arrays[micro_batch // cut.num_ranks]
            np.testing.assert_array_equal(array, np.where(rows.mask > 0, rows.labels + 0.5, 0))
