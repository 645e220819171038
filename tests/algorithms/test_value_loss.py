"""The critic's loss against float64 NumPy and central differences, and under every cutting of a batch."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from policy_loss_cases import LONGEST, PACKED, assert_close, central_differences

from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch

CUTTINGS = {
    "one response a row": RowOptions((LONGEST,), 8, 1, False),
    "one row a micro-batch": RowOptions((LONGEST,), 1, 1, True),
    "two ranks": RowOptions((LONGEST,), 1, 2, True),
    "four ranks": RowOptions((LONGEST,), 1, 4, False),
}


@dataclass
class Response:
    """float64 [n] each, but exact in float32."""

    new: np.ndarray
    old: np.ndarray
    returns: np.ndarray


def draw(seed, lengths=(3, 7, 1, 12, 5, 2, 9), spread=0.4):
    stream = np.random.default_rng(seed)
    responses = []
    for length in lengths:
        old, returns = stream.standard_normal(length), stream.standard_normal(length)
        parts = (old + spread * stream.standard_normal(length), old, returns)
        responses.append(Response(*(part.astype(np.float32).astype(np.float64) for part in parts)))
    return responses


def reference(responses, clip_range, values):
    """The formula, token by token; shares nothing with the package."""
    total, count = 0.0, 0
    for response, news in zip(responses, values):
        for new, old, target in zip(news, response.old, response.returns):
            error = (new - target) ** 2
            if clip_range:
                error = max(error, (min(max(new, old - clip_range), old + clip_range) - target) ** 2)
            total, count = total + 0.5 * error, count + 1
    return total / count


@functools.cache
def compiled(num_rows, clip_range):
    """Return a stand-in for a critic, whose values are a parameter, and the gradients of the loss over it."""
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.algorithms.value_loss import ValueLoss

    class Scores(nn.Cell):
        def __init__(self):
            super().__init__()
            self.values = ms.Parameter(np.zeros((num_rows, LONGEST), np.float32), name="values")

        def construct(self, input_ids, segment_ids, labels, mask):
            return self.values * mask, mask

    scores = Scores()
    cell = ValueLoss(scores, clip_range)
    return scores, ms.value_and_grad(cell, None, ms.ParameterTuple([scores.values]), has_aux=True)


def run(responses, clip_range, rows=PACKED):
    """Return loss, number of clipped tokens, and the gradient by value, one array per response."""
    import mindspore as ms

    from mindrlhf.algorithms.value_loss import VALUE_INPUTS, VALUE_STATISTICS

    scores, function = compiled(rows.rows_per_micro_batch, clip_range)
    sequences = []
    for index, response in enumerate(responses):
        tokens = {"new": response.new, "values": response.old, "returns": response.returns}
        tokens = {name: array.astype(np.float32) for name, array in tokens.items()}
        ids = np.arange(1, 2 + index % 3 + len(response.new), dtype=np.int32)
        sequences.append(TokenSequence(ids[: 1 + index % 3], ids[1 + index % 3 :], tokens))
    batch = make_batch(sequences, rows)
    total, shares = np.zeros(len(VALUE_STATISTICS)), []
    for rank in range(rows.num_ranks):
        share = batch.part_of(rank, rows.num_ranks)
        shares.append([])
        for packed in share.micro_batches:
            scores.values.set_data(ms.Tensor(packed.tokens["new"]))
            arrays = [packed.input_ids, packed.segment_ids, packed.labels, packed.mask]
            arrays += [packed.tokens[name] for name in VALUE_INPUTS]
            results, gradients = function(*map(ms.Tensor, arrays), ms.Tensor(share.num_tokens, ms.float32))
            loss, statistics, values = results
            assert float(loss) == statistics.asnumpy()[0]
            np.testing.assert_array_equal(values.asnumpy(), packed.tokens["new"])
            gradient = gradients[0].asnumpy().copy()
            assert not gradient[packed.mask == 0].any(), "a gradient outside the responses"
            total += statistics.asnumpy()
            shares[-1].append(gradient)
    return total[0], total[1], batch.collect(shares)


@pytest.mark.parametrize("clip_range", [0.0, 0.2, 5.0])
def test_value_and_gradient_equal_the_formula(clip_range):
    responses = draw(1)
    loss, _, gradient = run(responses, clip_range)
    expected, values = functools.partial(reference, responses, clip_range), [each.new for each in responses]
    assert loss == pytest.approx(expected(values), rel=1e-5)
    assert_close(gradient, central_differences(expected, values))


def test_clipped_values_are_counted_and_have_no_gradient():
    responses = draw(2, lengths=(8, 8, 8, 8))
    _, num_clipped, gradient = run(responses, 0.2)
    count = 0
    for response, slopes in zip(responses, gradient):
        bounded = np.clip(response.new, response.old - 0.2, response.old + 0.2)
        is_clipped = (bounded - response.returns) ** 2 > (response.new - response.returns) ** 2
        np.testing.assert_array_equal(slopes == 0, is_clipped)
        count += is_clipped.sum()
    assert num_clipped == count > 3


def test_nothing_is_clipped_before_the_first_update():
    """The values are still the old ones: the bound and the value are equally far from the return."""
    responses = draw(3)
    for response in responses:
        response.new = response.old.copy()
    loss, num_clipped, gradient = run(responses, 0.2)
    assert num_clipped == 0
    num_tokens = sum(len(each.old) for each in responses)
    assert loss == pytest.approx(sum(((each.old - each.returns) ** 2).sum() for each in responses) / 2 / num_tokens)
    assert_close(gradient, [(each.old - each.returns) / num_tokens for each in responses])


@pytest.mark.parametrize("cutting", CUTTINGS)
def test_the_cutting_of_a_batch_changes_nothing(cutting):
    responses = draw(4)
    plain, cut = run(responses, 0.2), run(responses, 0.2, CUTTINGS[cutting])
    assert cut[0] == pytest.approx(plain[0], rel=1e-6) and cut[1] == plain[1] > 0
    assert_close(cut[2], plain[2], rtol=1e-6)
