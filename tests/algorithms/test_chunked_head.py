"""The head in tiles, run by MindSpore's CPU operators, against full float64 logits."""

import functools

import numpy as np
import pytest
from test_logprobs import VOCABULARY, draw, expected, make_policy, run

from mindrlhf.algorithms.head import HeadTile

# 21 positions, 40 tokens of the vocabulary: tiles that divide them and tiles that do not.
TILES = [HeadTile(11, 15), HeadTile(7, 0)]


def chunked_cell(weight, tile: HeadTile):
    from mindrlhf.algorithms.chunked_head import ChunkedTokenLogProbs

    return ChunkedTokenLogProbs(weight, tile)


def make_chunked(tile: HeadTile, tied: bool):
    policy = make_policy("ascend", 0.7, tied)
    policy.token_logprobs = chunked_cell(policy.model.head_weight, tile)
    return policy


# Policies whose graphs are compiled once: who changes their weights puts them back.
chunked = functools.cache(make_chunked)


@pytest.mark.parametrize("tile, tied", [(TILES[0], False), (TILES[1], True)])
def test_values_and_gradients_equal_float64(tile, tied):
    policy, inputs = chunked(tile, tied), draw()
    logprobs, entropy, gradients = run(policy, *inputs)
    expected_logprobs, expected_entropy, expected_gradients = expected(policy, *inputs, 0.7)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


def test_large_logits_neither_overflow_nor_vanish():
    """Tiles whose largest logits are hundreds apart: a token of probability 1, and rows where none of a tile counts."""
    import mindspore as ms

    policy, (input_ids, labels, mask, weights) = chunked(TILES[0], False), draw()
    head = policy.model.head.asnumpy().copy()
    policy.model.head.set_data(ms.Tensor(head * np.float32(80)))
    try:
        found = run(policy, input_ids, labels, mask, weights)
        wanted = expected(policy, input_ids, labels, mask, weights, 0.7)
    finally:
        policy.model.head.set_data(ms.Tensor(head))
    assert np.abs(wanted[0]).max() > 100
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-3, atol=1e-4)
    for name, gradient in wanted[2].items():
        np.testing.assert_allclose(found[2][name], gradient, rtol=1e-3, atol=1e-2, err_msg=name)


def test_a_head_without_tiles_is_the_plain_one():
    from mindrlhf.algorithms.logprobs import GraphTokenLogProbs

    assert isinstance(make_policy("ascend", 1.0).token_logprobs, GraphTokenLogProbs)
    assert not HeadTile() and HeadTile(vocabulary=VOCABULARY)


def test_a_rank_with_half_of_the_vocabulary():
    """Collectives that add what the other rank would send: results of all tokens, gradients of the own ones.

    The stand-in adds the same numbers to the slopes of the backward pass, so those are what gradients are expected of.
    """
    import mindspore as ms
    from mindspore import nn, ops

    policy, (input_ids, labels, mask, weights) = make_chunked(HeadTile(11, 8), False), draw()
    head, part = policy.model.head.asnumpy().astype(np.float64), VOCABULARY // 2
    hidden = policy.model.table.asnumpy()[input_ids.reshape(-1)].astype(np.float64) / 0.7
    logits, rows = hidden @ head.T, np.arange(labels.size)
    other, own = slice(0, part), slice(part, VOCABULARY)  # rank 1 of two
    highest = logits.max(1, keepdims=True)
    powers, is_other = np.exp(logits - highest)[:, other], (labels.reshape(-1) < part)
    chosen = (logits[rows, labels.reshape(-1)] - highest[:, 0]) * is_other
    sent = np.stack([powers.sum(1), (powers * (logits - highest)[:, other]).sum(1), chosen], 1).astype(np.float32)

    class Sum(nn.Cell):
        def construct(self, values):
            return values + ms.Tensor(sent)

    class Largest(nn.Cell):
        def construct(self, values):
            return ops.maximum(values, ms.Tensor(logits[:, other].max(1, keepdims=True).astype(np.float32)))

    policy.model.head = policy.model.head_weight = ms.Parameter(head[own].astype(np.float32), name="head")
    cell = chunked_cell(policy.model.head, HeadTile(11, 8))
    cell.first_rows = ms.Tensor(np.array([part], np.int32))
    cell.total, cell.largest = Sum(), Largest()
    policy.token_logprobs = cell
    arrays = [ms.Tensor(one) for one in (input_ids, np.ones_like(input_ids), labels, mask)]

    class WeightedSum(nn.Cell):
        def construct(self, *inputs):
            logprobs, entropy = policy(*inputs)
            return (logprobs * ms.Tensor(weights[0]) + entropy * ms.Tensor(weights[1])).sum(), logprobs, entropy

    parameters = ms.ParameterTuple([policy.model.table, policy.model.head])
    gradient = ops.value_and_grad(WeightedSum(), None, parameters, has_aux=True)
    (_, logprobs, entropy), (grad_table, grad_head) = ms.jit(gradient)(*arrays)

    log_p = logits - highest - np.log(np.exp(logits - highest).sum(1, keepdims=True))
    p, is_label = np.exp(log_p), np.eye(VOCABULARY)[labels.reshape(-1)]
    wanted = -(p * log_p).sum(1)
    np.testing.assert_allclose(logprobs.asnumpy().reshape(-1), (log_p * is_label).sum(1) * mask.reshape(-1), atol=1e-5)
    np.testing.assert_allclose(entropy.asnumpy().reshape(-1), wanted * mask.reshape(-1), atol=1e-5)
    slopes = (weights * mask).reshape(2, -1, 1) + sent.T[:2, :, None]
    grad_logits = slopes[0] * (is_label - p) - slopes[1] * p * (log_p + wanted[:, None])
    np.testing.assert_allclose(grad_head.asnumpy(), grad_logits[:, own].T @ hidden, rtol=1e-4, atol=1e-4)
    expected_table = np.zeros((VOCABULARY, hidden.shape[1]))
    np.add.at(expected_table, input_ids.reshape(-1), grad_logits[:, own] @ head[own] / 0.7)
    np.testing.assert_allclose(grad_table.asnumpy(), expected_table, rtol=1e-4, atol=1e-4)
