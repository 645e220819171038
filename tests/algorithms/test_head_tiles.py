"""The head in tiles, run by MindSpore's CPU operators, against full float64 logits."""

import functools

import numpy as np
import pytest
from slow_tests import SLOW
from test_logprobs import draw, expected, make_policy, run

TILES = [11, 7]  # of 21 positions: one does not divide them


def make_tiled(tile: int, tied: bool):
    from mindrlhf.algorithms.logprobs import GraphTokenLogProbs

    policy = make_policy("ascend", 0.7, tied)
    policy.token_logprobs = GraphTokenLogProbs(policy.model.head_weight, tile=tile)
    return policy


# Policies whose graphs are compiled once: who changes their weights puts them back.
tiled = functools.cache(make_tiled)


@pytest.mark.parametrize("tile, tied", [(TILES[0], False), pytest.param(TILES[1], True, marks=SLOW)])
def test_values_and_gradients_equal_float64(tile, tied):
    policy, inputs = tiled(tile, tied), draw()
    logprobs, entropy, gradients = run(policy, *inputs)
    expected_logprobs, expected_entropy, expected_gradients = expected(policy, *inputs, 0.7)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


def test_large_logits_neither_overflow_nor_vanish():
    """Rows where one token has all of the probability."""
    import mindspore as ms

    policy, (input_ids, labels, mask, weights) = tiled(TILES[0], False), draw()
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
