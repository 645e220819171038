"""The head in tiles, run by MindSpore's CPU operators, against full float64 logits."""

import numpy as np
import pytest
from test_logprobs import VOCABULARY, draw, expected, make_policy, run

from mindrlhf.algorithms.vocabulary import HeadTile

# 21 positions, 40 words: tiles that divide them and tiles that do not.
TILES = [HeadTile(11, 15), HeadTile(7, 0), HeadTile(0, 20)]


def chunked(tile: HeadTile, tied: bool = False):
    from mindrlhf.algorithms.chunked_head import ChunkedTokenLogProbs

    policy = make_policy("ascend", 0.7, tied)
    policy.token_logprobs = ChunkedTokenLogProbs(policy.model.head_weight, tile)
    return policy


@pytest.mark.parametrize("tile, tied", [(TILES[0], True), (TILES[1], False), (TILES[2], False)])
def test_values_and_gradients_equal_float64(tile, tied):
    policy, inputs = chunked(tile, tied), draw()
    logprobs, entropy, gradients = run(policy, *inputs)
    expected_logprobs, expected_entropy, expected_gradients = expected(policy, *inputs, 0.7)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


def test_large_logits_neither_overflow_nor_vanish():
    """Tiles whose largest logits are hundreds apart: a word of probability 1, and rows where none of a tile counts."""
    import mindspore as ms

    policy, (input_ids, labels, mask, weights) = chunked(TILES[0]), draw()
    policy.model.head.set_data(ms.Tensor(policy.model.head.asnumpy() * np.float32(80)))
    found = run(policy, input_ids, labels, mask, weights)
    wanted = expected(policy, input_ids, labels, mask, weights, 0.7)
    assert np.abs(wanted[0]).max() > 100
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-3, atol=1e-4)
    for name, gradient in wanted[2].items():
        np.testing.assert_allclose(found[2][name], gradient, rtol=1e-3, atol=1e-2, err_msg=name)


def test_a_head_without_tiles_is_the_plain_one():
    from mindrlhf.algorithms.logprobs import GraphTokenLogProbs

    assert isinstance(make_policy("ascend", 1.0).token_logprobs, GraphTokenLogProbs)
    assert not HeadTile() and HeadTile(words=VOCABULARY)
