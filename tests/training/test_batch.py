"""Batches: micro-batches that divide among the ranks, shares that travel, and results that find their way back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.config.training import BEST_FIT, SHARED_PROMPTS
from mindrlhf.data.packing import PackedRows, TokenSequence, plan_rows
from mindrlhf.layout.packing import RowCost
from mindrlhf.training.batch import RowOptions, batch_of_rows, make_batch
from mindrlhf.training.loop.report import packing_metrics

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


@given(shapes=shape_lists, options=options)
def test_shares_are_equal_in_number_and_hold_every_token_once(shapes, options):
    sequences = make_sequences(shapes)
    batch = make_batch(sequences, options)
    assert len(batch.micro_batches) % options.num_ranks == 0
    assert batch.num_tokens == sum(response for _, response in shapes)
    tokens, num_counted = [], 0
    for rank in range(options.num_ranks):
        share = batch.part_of(rank, options.num_ranks)
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


group_lists = st.lists(
    st.tuples(st.integers(1, 10), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=5
)
fitted = st.builds(
    RowOptions,
    row_lengths=st.sampled_from([(30,), (12, 30), (8, 16, 48)]),
    rows_per_micro_batch=st.integers(1, 6),
    num_ranks=st.integers(1, 5),
    pack=st.just(True),
    packing=st.sampled_from([BEST_FIT, SHARED_PROMPTS]),
    cost=st.builds(RowCost, st.just(1.0), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 2.0])),
    in_step=st.booleans(),
)


def make_groups(groups) -> list[TokenSequence]:
    """Sequences as ``make_sequences`` makes them, with the prompt of the first of their group."""
    sequences = make_sequences([(prompt, response) for prompt, responses in groups for response in responses])
    prompts = iter(sequences)
    shared = []
    for _, responses in groups:
        own = [next(prompts) for _ in responses]
        shared += [replace(sequence, prompt_ids=own[0].prompt_ids) for sequence in own]
    return shared


def visible(rows: PackedRows, row: int, position: int) -> list[int]:
    """The tokens that a position sees, itself included, as :class:`mindrlhf.models.causal_lm.CausalLM` says it."""
    segments = rows.segment_ids[row]
    seen = {segments[position], rows.context["prefix_ids"][row, position] if rows.context else segments[position]}
    return [int(rows.input_ids[row, key]) for key in range(position + 1) if segments[key] in seen]


@given(groups=group_lists, options=fitted)
def test_every_token_is_predicted_from_its_own_prompt_and_response(groups, options):
    """No response sees another: what a position sees is the prompt and the response up to the token it predicts."""
    sequences = make_groups(groups)
    batch = make_batch(sequences, options)
    assert batch.num_tokens == sum(int(rows.mask.sum()) for rows in batch.micro_batches)
    for sequence, (number, row, first, last) in zip(sequences, batch.placed, strict=True):
        rows = batch.micro_batches[number]
        assert rows.labels[row, first:last].tolist() == sequence.response_ids.tolist()
        assert rows.mask[row, first:last].all()
        np.testing.assert_array_equal(rows.tokens["advantages"][row, first:last], sequence.values["advantages"])
        text = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
        for index, position in enumerate(range(first, last)):
            length = len(sequence.prompt_ids) + index
            assert visible(rows, row, position) == text[:length]
            if rows.context:
                assert rows.context["positions"][row, position] == length - 1


@given(groups=group_lists, options=fitted)
def test_the_rows_do_not_depend_on_the_ranks(groups, options):
    sequences = make_groups(groups)

    def contents(num_ranks: int) -> list[bytes]:
        batch = make_batch(sequences, replace(options, num_ranks=num_ranks))
        found = [rows.input_ids[row] for rows in batch.micro_batches for row in np.flatnonzero(rows.mask.any(1))]
        return sorted(row.tobytes() for row in found)

    assert contents(options.num_ranks) == contents(1)


@given(groups=group_lists, options=fitted)
def test_fitted_micro_batches_come_back_and_have_shapes_that_were_announced(groups, options):
    batch, ranks = make_batch(make_groups(groups), options), range(options.num_ranks)
    shares = [batch.part_of(rank, options.num_ranks).micro_batches for rank in ranks]
    shapes = {rows.model_inputs.shape for rows in options.shapes()}
    assert {rows.model_inputs.shape for rows in batch.micro_batches} <= shapes
    for ours, theirs in zip(batch.in_order(shares), batch.micro_batches, strict=True):
        assert ours.input_ids is theirs.input_ids
    if options.in_step:
        for same_number in zip(*shares, strict=True):
            assert len({rows.mask.shape for rows in same_number}) == 1
    else:
        assert all(row.any() for rows in batch.micro_batches for row in rows.segment_ids), "no padding rows"
    advantages = [[rows.tokens["advantages"] for rows in share] for share in shares]
    for share, spread in zip(advantages, batch.spread(batch.collect(advantages), len(ranks)), strict=True):
        for array, expected in zip(spread, share, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_a_prompt_is_shared_as_written():
    """Two responses of the prompt 1 2 3, and one of the prompt 4."""
    prompt, other = np.array([1, 2, 3], np.int32), np.array([4], np.int32)
    responses = (np.array([5, 6], np.int32), np.array([7], np.int32), np.array([8, 9], np.int32))
    values = [{"weights": np.arange(len(response), dtype=np.float32) + 1} for response in responses]
    sequences = [TokenSequence(*one) for one in zip((prompt, prompt, other), responses, values)]
    batch = make_batch(sequences, RowOptions((8,), 1, 1, True, SHARED_PROMPTS))
    (rows,) = batch.micro_batches
    assert rows.input_ids.tolist() == [[1, 2, 3, 5, 3, 4, 8, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 2, 2, 3, 5, 5, 0]]
    assert rows.labels.tolist() == [[0, 0, 5, 6, 7, 8, 9, 0]]
    assert rows.mask.tolist() == [[0, 0, 1, 1, 1, 1, 1, 0]]
    assert rows.tokens["weights"].tolist() == [[0, 0, 1, 2, 1, 1, 2, 0]]
    assert rows.context["prefix_ids"].tolist() == [[1, 1, 1, 1, 1, 4, 4, 0]]
    assert rows.context["positions"].tolist() == [[0, 1, 2, 3, 2, 0, 1, 0]]
    assert batch.placed == ((0, 0, 2, 4), (0, 0, 4, 5), (0, 0, 5, 7))


def test_the_rows_of_the_quickstart_are_full():
    """Lengths as its samples have them: prompts of 23 to 45 tokens, 8 responses each of 9 to 24."""
    path = Path(__file__).parents[2] / "examples" / "quickstart" / "config.yaml"
    training = yaml.safe_load(path.read_text())["training"]
    assert training["packing"] == SHARED_PROMPTS
    random, efficiencies = np.random.default_rng(0), []
    for _ in range(10):
        prompts = np.clip(23 + random.gamma(2, 3.2, 16), 23, 45).astype(int)
        groups = [(int(prompt), np.clip(random.normal(15, 2.5, 8), 9, 24).astype(int)) for prompt in prompts]
        sequences = make_groups(groups)
        batch = make_batch(
            sequences,
            RowOptions(tuple(training["sequence_lengths"]), training["micro_batch_size"], 2, True, SHARED_PROMPTS),
        )
        metrics = packing_metrics([batch])
        efficiencies.append(metrics["packing/efficiency"])
        plain = sum(sequence.num_tokens for sequence in sequences)
        assert plain > 2 * sum(rows.mask.size for rows in batch.micro_batches)
    assert np.mean(efficiencies) >= 0.95 and min(efficiencies) >= 0.9


def test_ranks_in_step_have_equal_shapes_with_plain_packing_too():
    sequences = make_sequences([(1, 2), (1, 20)])
    batch = make_batch(sequences, RowOptions((8, 24), 1, 2, True, in_step=True))
    assert [rows.mask.shape for rows in batch.micro_batches] == [(1, 8), (1, 8), (1, 24), (1, 24)]


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


def test_a_sequence_longer_than_the_rows_is_an_error():
    with pytest.raises(ValueError, match="sequence 0 has 20 tokens"):
        make_batch(make_sequences([(10, 10)]), RowOptions((16,), 1, 1, True))


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
            array = spread[micro_batch % cut.num_ranks][micro_batch // cut.num_ranks]
            np.testing.assert_array_equal(array, np.where(rows.mask > 0, rows.labels + 0.5, 0))
