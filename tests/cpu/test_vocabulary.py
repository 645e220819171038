"""The tiled kernels against full float64 logits and against central differences."""

import numpy as np
import pytest
import vocabulary_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary_reference import NUM_TOKENS, draw
from vocabulary_reference import tiles as tiles  # a fixture

from mindrlhf.cpu.training import vocabulary
from mindrlhf.cpu.training.vocabulary import LogSoftmax


def backward(hidden, weight, *others, softmax=None):
    """Return the gradients of hidden states and weight, by what ``forward`` has kept or by logits computed again."""
    grad_weight = np.zeros_like(weight)
    return (softmax or LogSoftmax()).backward(hidden, weight, *others, grad_weight), grad_weight


def draw_gradients(seed, mask):
    stream = np.random.default_rng([seed, 1])
    return (stream.standard_normal((2, len(mask))) * mask).astype(np.float32)


@pytest.mark.parametrize("silent", [0.0, 0.4], ids=["all", "some-without-gradient"])
@pytest.mark.parametrize("with_entropy", [False, True], ids=["logprobs", "logprobs-and-entropy"])
def test_backward_equals_float64(tiles, with_entropy, silent):
    inputs = draw(1)
    grad_logprobs, grad_entropy = draw_gradients(1, inputs[3])
    grad_logprobs = np.where(np.random.default_rng(8).random(NUM_TOKENS) < silent, np.float32(0.0), grad_logprobs)
    grad_entropy = grad_entropy * with_entropy
    softmax = LogSoftmax()
    softmax.forward(*draw(9, num_tokens=1))  # what it has kept is of no use any more
    _, entropy, log_normaliser = softmax.forward(*inputs)
    expected = reference.backward(*inputs, grad_logprobs, grad_entropy)
    for _ in range(2):  # what is kept is forgotten then
        actual = backward(*inputs, entropy, log_normaliser, grad_logprobs, grad_entropy, softmax=softmax)
        for name, ours, theirs in zip(("hidden", "weight"), actual, expected):
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max(), err_msg=name)


def test_what_is_kept_is_not_computed_again(monkeypatch):
    inputs = draw(1)
    softmax, grad_logprobs = LogSoftmax(), draw_gradients(1, inputs[3])[0]
    _, entropy, log_normaliser = softmax.forward(*inputs)
    monkeypatch.setattr(softmax, "_logits", None)
    backward(*inputs, entropy, log_normaliser, grad_logprobs, np.zeros_like(grad_logprobs), softmax=softmax)


@pytest.mark.parametrize("scale", [20.0, 80.0])
def test_words_of_almost_no_probability_have_their_gradient(tiles, scale):
    """Logits so far apart that a label's own place among what is kept could not be told in float32."""
    inputs = draw(5, scale=scale)
    grad_logprobs, _ = draw_gradients(5, inputs[3])
    nothing, softmax = np.zeros_like(grad_logprobs), LogSoftmax()
    logprobs, entropy, log_normaliser = softmax.forward(*inputs)
    assert scale < 80.0 or logprobs.min() < -88.0, "exp would be 0"
    actual = backward(*inputs, entropy, log_normaliser, grad_logprobs, nothing, softmax=softmax)
    for ours, theirs in zip(actual, reference.backward(*inputs, grad_logprobs, nothing)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5 * np.abs(theirs).max())


def test_backward_equals_central_differences():
    """The float64 reference too, so that both cannot share a wrong formula."""
    hidden, weight, labels, mask = draw(2, num_tokens=5, vocabulary_size=9)
    grad_logprobs, grad_entropy = draw_gradients(2, mask)
    _, entropy, log_normaliser = LogSoftmax().forward(hidden, weight, labels, mask)
    actual = backward(hidden, weight, labels, mask, entropy, log_normaliser, grad_logprobs, grad_entropy)

    def objective(hidden, weight):
        logprobs, entropies, _ = reference.forward(hidden, weight, labels, mask)
        return (grad_logprobs * logprobs).sum() + (grad_entropy * entropies).sum()

    step = 1e-5
    arrays = [hidden.astype(np.float64), weight.astype(np.float64)]
    for which, gradient in enumerate(actual):
        for place in np.ndindex(gradient.shape):
            shifted = [[array.copy() for array in arrays] for _ in range(2)]
            shifted[0][which][place] += step
            shifted[1][which][place] -= step
            difference = (objective(*shifted[0]) - objective(*shifted[1])) / (2 * step)
            assert gradient[place] == pytest.approx(difference, rel=1e-4, abs=1e-5), (which, place)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 40),
    vocabulary_size=st.integers(1, 70),
    token_tile=st.integers(1, 50),
    block=st.integers(1, 50),
)
def test_tiles_change_nothing(seed, num_tokens, vocabulary_size, token_tile, block):
    hidden, weight, labels, mask = draw(seed, num_tokens, vocabulary_size)
    gradients = draw_gradients(seed, mask)
    expected = reference.forward(hidden, weight, labels, mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "MAX_TILE_BYTES", token_tile * vocabulary_size * 4)
        patch.setattr(vocabulary, "BLOCK_BYTES", block * vocabulary_size * 4)
        actual = LogSoftmax().forward(hidden, weight, labels, mask)
        slopes = backward(hidden, weight, labels, mask, *actual[1:], *gradients)
    for ours, theirs in zip(actual, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(slopes, reference.backward(hidden, weight, labels, mask, *gradients)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_skipped_positions_are_zero_and_never_read(tiles):
    hidden, weight, labels, mask = draw(3)
    poisoned = hidden.copy()
    poisoned[mask == 0] = np.nan
    outputs = LogSoftmax().forward(poisoned, weight, labels, mask)
    grad_hidden, grad_weight = backward(
        poisoned, weight, labels, mask, *outputs[1:], np.ones_like(mask), np.ones_like(mask)
    )
    for output in outputs:
        assert (output[mask == 0] == 0).all()
        assert np.isfinite(output).all()
    assert (grad_hidden[mask == 0] == 0).all()
    assert np.isfinite(grad_weight).all()
    np.testing.assert_allclose(
        grad_weight, reference.backward(hidden, weight, labels, mask, mask, mask)[1], rtol=1e-4, atol=1e-4
    )


def test_nothing_to_compute():
    hidden, weight, labels, mask = draw(4)
    outputs = LogSoftmax().forward(hidden, weight, labels, np.zeros_like(mask))
    slopes = backward(hidden, weight, labels, np.zeros_like(mask), *outputs[1:], np.ones_like(mask), np.ones_like(mask))
    assert all((array == 0).all() for array in (*outputs, *slopes))


def test_the_weight_gradient_is_added_to_what_is_there():
    inputs = draw(6)
    outputs = LogSoftmax().forward(*inputs)
    gradients = draw_gradients(6, inputs[3])
    once = backward(*inputs, *outputs[1:], *gradients)[1]
    total = np.full_like(once, 2.0)
    for _ in range(3):
        LogSoftmax().backward(*inputs, *outputs[1:], *gradients, total)
    np.testing.assert_allclose(total, 2.0 + 3.0 * once, rtol=1e-5, atol=1e-5)


def test_logits_of_ten_thousand_do_not_overflow(tiles):
    """Width 1, so that the logits are 1e4, -1e4 and numbers between them exactly."""
    hidden = np.array([[1e4], [1e4], [-1e4], [1e4]], np.float32)
    weight = np.array([[-1.0], [0.0], [1.0], [1.0], [0.5]], np.float32)
    labels, mask = np.array([2, 0, 0, 4], np.int32), np.ones(4, np.float32)
    logprobs, entropy, log_normaliser = LogSoftmax().forward(hidden, weight, labels, mask)
    # Two tokens share the top of rows 0, 1 and 3; row 2 has one.
    expected = [-np.log(2), -2e4 - np.log(2), 0.0, -5e3 - np.log(2)]
    # float32 resolves 1e4 to 1e-3.
    np.testing.assert_allclose(logprobs, expected, atol=2e-3)
    np.testing.assert_allclose(entropy, [np.log(2), np.log(2), 0.0, np.log(2)], atol=2e-3)
    slopes = backward(
        hidden, weight, labels, mask, entropy, log_normaliser, np.ones(4, np.float32), np.ones(4, np.float32)
    )
    for ours in slopes:
        assert np.isfinite(ours).all()
    expected_slopes = reference.backward(hidden, weight, labels, mask, np.ones(4), np.ones(4))
    np.testing.assert_allclose(slopes[0], expected_slopes[0], atol=5e-3)


def test_a_certain_token_has_logprob_zero_and_no_gradient():
    hidden, weight = np.full((2, 1), 1e4, np.float32), np.array([[-1.0], [1.0], [-0.5]], np.float32)
    labels, mask = np.array([1, 1], np.int32), np.ones(2, np.float32)
    logprobs, entropy, log_normaliser = LogSoftmax().forward(hidden, weight, labels, mask)
    np.testing.assert_array_equal(logprobs, 0.0)
    np.testing.assert_allclose(entropy, 0.0, atol=1e-3)
    slopes = backward(hidden, weight, labels, mask, entropy, log_normaliser, mask, np.zeros_like(mask))
    for ours in slopes:
        np.testing.assert_allclose(ours, 0.0, atol=1e-6)
