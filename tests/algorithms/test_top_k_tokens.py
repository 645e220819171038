"""Log-probabilities of several words at each position, and the likeliest words, against full float64 logits."""

import functools

import numpy as np
import pytest
import vocabulary_reference as reference
from head_hooks import bind, collect_weight_gradient, graph_parameters
from test_logprobs import LENGTH, ROWS, VOCABULARY, draw, make_policy
from vocabulary_reference import draw as draw_rows
from vocabulary_reference import tiles as tiles  # a fixture

from mindrlhf.algorithms.head import WHOLE_HEAD, HeadTile, likeliest_first
from mindrlhf.cpu.training import vocabulary

K, TEMPERATURE = 5, 0.7
FORMS = {
    "cpu": ("cpu", WHOLE_HEAD),
    "plain": ("ascend", WHOLE_HEAD),
    "chunked": ("ascend", HeadTile(11, 15)),
    "by word": ("ascend", HeadTile(0, 3)),  # tiles of fewer words than are asked for
}


def log_softmax(hidden, weight):
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def with_rest(full, words):
    """Log-probabilities of the words and of all others together, by a sum over the others."""
    chosen = np.zeros(full.shape, bool)
    np.put_along_axis(chosen, words.astype(np.int64), True, axis=-1)
    rest = np.log(np.where(chosen, 0.0, np.exp(full)).sum(axis=-1, keepdims=True))
    return np.concatenate([np.take_along_axis(full, words.astype(np.int64), -1), rest], axis=-1)


def assert_logprobs(found, expected, form="cpu"):
    """Compare those of words, and the rest's as probabilities: it is 1 - sum, and float32 in graphs.

    MindSpore's CPU kernel of exp has relative errors of 2e-6.
    """
    np.testing.assert_allclose(found[..., :-1], expected[..., :-1], rtol=1e-5, atol=1e-5)
    atol = 1e-6 if form == "cpu" else 1e-5
    np.testing.assert_allclose(np.exp(found[..., -1]), np.exp(expected[..., -1]), rtol=0, atol=atol)


def draw_words(seed, num_tokens, size, k=K):
    """Words of each position, all different; some are the label of :func:`draw`, as the teacher's may be."""
    stream = np.random.default_rng([seed, 2])
    return np.stack([stream.permutation(size)[:k] for _ in range(num_tokens)]).astype(np.int32)


def likeliest(logprobs, k, num_words):
    """The k likeliest of the first words by a sort of (log-probability, word) pairs in Python."""
    return np.array([sorted(range(num_words), key=lambda word: (-row[word], word))[:k] for row in logprobs], np.int64)


def expected_gradients(hidden, weight, labels, words, slopes):
    """Gradients of the slopes' products with log p(label), entropy and log p(words), by the Jacobian of log-softmax."""
    logprobs = log_softmax(hidden, weight)
    probs, rows = np.exp(logprobs), np.arange(len(labels))
    wanted = np.zeros_like(probs)  # d result / d log p
    wanted[rows, labels] += slopes[0]
    wanted -= slopes[1][:, None] * probs * (logprobs + 1)
    others = np.ones_like(probs)
    for column in range(words.shape[1]):
        wanted[rows, words[:, column]] += slopes[2][:, column]
        others[rows, words[:, column]] = 0
    of_rest = probs * others  # d log sum p / d log p = p / sum p
    wanted += slopes[2][:, -1:] * of_rest / of_rest.sum(axis=1, keepdims=True)
    grad_logits = wanted - probs * wanted.sum(axis=1, keepdims=True)
    return grad_logits @ weight.astype(np.float64), grad_logits.T @ hidden.astype(np.float64)


def test_kernels_of_given_words_equal_float64(tiles):
    inputs = draw_rows(2)
    hidden, weight, labels, mask = inputs
    words, stream = draw_words(2, len(labels), len(weight)), np.random.default_rng(4)
    words[:6, 0] = labels[:6]
    for row in range(6):  # all different, as promised
        words[row, 1:] = [word for word in range(len(weight)) if word != labels[row]][: K - 1]
    *plain, found = vocabulary.forward(*inputs, words)
    for ours, theirs in zip(plain, vocabulary.forward(*inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    expected = with_rest(log_softmax(hidden, weight), words) * mask[:, None]
    assert_logprobs(found, expected)

    slopes = [(stream.standard_normal(mask.shape) * mask).astype(np.float32) for _ in range(2)]
    slopes.append((stream.standard_normal(found.shape) * mask[:, None]).astype(np.float32))
    slopes[0][3] = slopes[1][3] = 0  # a position with the words' gradients alone
    grad_weight = np.zeros_like(weight)
    given = (words, found, slopes[2])
    grad_hidden = vocabulary.backward(*inputs, plain[1], plain[2], *slopes[:2], grad_weight, given)
    wanted = expected_gradients(hidden, weight, labels, words, slopes)
    for name, ours, theirs in zip(("hidden", "weight"), (grad_hidden, grad_weight), wanted):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.parametrize("num_words", [50, 48, 7])
def test_kernel_finds_the_likeliest_words(tiles, num_words):
    inputs = draw_rows(5)
    hidden, weight, labels, mask = inputs
    logprobs, words, word_logprobs = vocabulary.top_words(*inputs, K, num_words)
    assert (np.diff(words[mask != 0]) > 0).all()
    words, word_logprobs = likeliest_first(words, word_logprobs)
    active, full = mask != 0, log_softmax(hidden, weight)
    np.testing.assert_array_equal(words[active], likeliest(full, K, num_words)[active])
    assert_logprobs(word_logprobs[active], with_rest(full, words)[active])
    np.testing.assert_array_equal(logprobs, vocabulary.forward(*inputs)[0])
    assert words.dtype == np.int32 and not words[~active].any() and not word_logprobs[~active].any()


def tied_head(size, width, seed=0):
    """Small whole numbers, whose products are exact: many words have equal logits."""
    return np.random.default_rng(seed).integers(-1, 2, (size, width)).astype(np.float32)


def test_kernel_breaks_ties_by_the_smallest_word(tiles):
    _, _, labels, mask = draw_rows(6)
    hidden, weight = tied_head(len(labels), 6, 1), tied_head(50, 6, 2)
    _, words, logprobs = vocabulary.top_words(hidden, weight, labels, mask, 9, 50)
    words, _ = likeliest_first(words, logprobs)
    logits = hidden.astype(np.int64) @ weight.astype(np.int64).T
    expected = likeliest(logits, 9, 50)
    kth = np.take_along_axis(logits, expected[:, -1:], 1)
    assert ((logits == kth).sum(axis=1) > 1).mean() > 0.5, "no ties at the edge to be broken"
    np.testing.assert_array_equal(words[mask != 0], expected[mask != 0])


@functools.cache
def policy_of(form: str, tied: bool):
    """A policy of tests that leave its weights as they are."""
    from mindrlhf.algorithms.top_k.cells import WordLogProbs

    device, tile = FORMS[form]
    return WordLogProbs(make_policy(device, TEMPERATURE, tied).model, TEMPERATURE, device, tile)


def run(policy, inputs, words, slopes):
    """Return log-probs, entropies and words' log-probs, and the gradients, by parameter, of their weighted sum."""
    import mindspore as ms
    from mindspore import nn, ops

    class WeightedSum(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.policy = policy

        def construct(self, input_ids, segment_ids, labels, mask, words, first, second, third):
            found = self.policy(input_ids, segment_ids, labels, mask, words)
            return (found[0] * first + found[1] * second).sum() + (found[2] * third).sum(), found

    class Gradients(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            parameters = ms.ParameterTuple(graph_parameters(policy))
            self.function = ops.value_and_grad(WeightedSum(), None, parameters, has_aux=True)

        def construct(self, *inputs):
            return self.function(*inputs)

    input_ids, labels, mask = inputs
    bind(policy)
    arrays = (input_ids, np.ones_like(input_ids), labels, mask, words, *slopes)
    (_, found), parts = Gradients()(*map(ms.Tensor, arrays))
    named = zip(graph_parameters(policy), parts, strict=True)
    gradients = {one.name: part.asnumpy().copy() for one, part in named}
    outside = np.zeros(policy.model.head_weight.shape, np.float32)
    collect_weight_gradient(policy, outside)
    head = policy.model.head_weight.name
    gradients[head] = gradients.get(head, 0.0) + outside
    return [one.asnumpy() for one in found], gradients


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_cells_of_given_words_equal_float64(form, tied):
    policy = policy_of(form, tied)
    input_ids, labels, mask, weights = draw()
    words = draw_words(1, ROWS * LENGTH, VOCABULARY).reshape(ROWS, LENGTH, K)
    words[0, 0] = [labels[0, 0], *[word for word in range(VOCABULARY) if word != labels[0, 0]][: K - 1]]
    mask[0, 0] = 1
    third = np.random.default_rng(9).standard_normal((ROWS, LENGTH, K + 1)).astype(np.float32)
    found, gradients = run(policy, (input_ids, labels, mask), words, (*weights, third))
    hidden = policy.model.table.asnumpy()[input_ids.reshape(-1)].astype(np.float64) / TEMPERATURE
    head, flat = policy.model.head_weight.asnumpy(), mask.reshape(-1)
    logprobs, entropy, _ = reference.forward(hidden, head, labels.reshape(-1), flat)
    of_words = with_rest(log_softmax(hidden, head), words.reshape(-1, K)) * flat[:, None]
    for ours, theirs in zip(found, (logprobs, entropy), strict=False):
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-5)
    assert_logprobs(found[2].reshape(of_words.shape), of_words, form)
    slopes = [weights[0].reshape(-1) * flat, weights[1].reshape(-1) * flat, third.reshape(-1, K + 1) * flat[:, None]]
    grad_hidden, grad_head = expected_gradients(hidden, head, labels.reshape(-1), words.reshape(-1, K), slopes)
    grad_table = np.zeros(policy.model.table.shape)
    np.add.at(grad_table, input_ids.reshape(-1), grad_hidden / TEMPERATURE)
    expected = {"table": grad_table + grad_head} if tied else {"table": grad_table, "head": grad_head}
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_without_words_it_is_the_plain_cell(form):
    import mindspore as ms

    policy, (input_ids, labels, mask, _) = policy_of(form, False), draw()
    plain = make_policy(FORMS[form][0], TEMPERATURE)
    results = []
    for one in (policy, plain):
        bind(one)
        results.append([part.asnumpy() for part in one(*map(ms.Tensor, (input_ids, input_ids, labels, mask)))])
    for ours, theirs in zip(*results, strict=True):
        if form in ("cpu", "plain"):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_words", [VOCABULARY, VOCABULARY - 3])
@pytest.mark.parametrize("form", FORMS)
def test_cells_find_the_likeliest_words_ties_by_the_smallest(form, num_words):
    import mindspore as ms

    from mindrlhf.algorithms.top_k.cells import TopWords

    device, tile = FORMS[form]
    policy, (input_ids, labels, mask, _) = make_policy(device, 0.5), draw()
    policy.model.table.set_data(ms.Tensor(tied_head(VOCABULARY, 5, 1)))
    policy.model.head.set_data(ms.Tensor(tied_head(VOCABULARY, 5, 2)))
    cell = TopWords(policy, 7, num_words, tile)
    bind(policy)
    found = cell(*map(ms.Tensor, (input_ids, np.ones_like(input_ids), labels, mask)))
    logprobs, *of_words = (one.asnumpy() for one in found)
    words, word_logprobs = likeliest_first(*of_words)
    hidden = policy.model.table.asnumpy()[input_ids] * 2
    full, active = log_softmax(hidden, policy.model.head.asnumpy()), mask != 0
    logits = (hidden.astype(np.int64) @ policy.model.head.asnumpy().astype(np.int64).T)[active]
    expected = likeliest(logits, 7, num_words)
    assert words.dtype == np.int32 and words.shape == (ROWS, LENGTH, 7) and word_logprobs.dtype == np.float32
    np.testing.assert_array_equal(words[active], expected)
    assert_logprobs(word_logprobs[active], with_rest(full[active], expected), form)
    chosen = np.take_along_axis(full, labels[..., None].astype(np.int64), 2)[..., 0]
    np.testing.assert_allclose(logprobs, chosen * mask, atol=2e-6)
    assert not words[~active].any() and not word_logprobs[~active].any()
