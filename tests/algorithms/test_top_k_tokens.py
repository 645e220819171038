"""Log-probabilities of several tokens at each position, and the top-k tokens, against full float64 logits."""

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
    "by token": ("ascend", HeadTile(0, 3)),  # tiles of fewer tokens than are asked for
}


def log_softmax(hidden, weight):
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def with_rest(full, token_ids):
    """Log-probabilities of the tokens and of all others together, by a sum over the others."""
    chosen = np.zeros(full.shape, bool)
    np.put_along_axis(chosen, token_ids.astype(np.int64), True, axis=-1)
    rest = np.log(np.where(chosen, 0.0, np.exp(full)).sum(axis=-1, keepdims=True))
    return np.concatenate([np.take_along_axis(full, token_ids.astype(np.int64), -1), rest], axis=-1)


def assert_logprobs(found, expected, form="cpu"):
    """Compare those of tokens, and the rest's as probabilities: it is 1 - sum, and float32 in graphs.

    MindSpore's CPU kernel of exp has relative errors of 2e-6.
    """
    np.testing.assert_allclose(found[..., :-1], expected[..., :-1], rtol=1e-5, atol=1e-5)
    atol = 1e-6 if form == "cpu" else 1e-5
    np.testing.assert_allclose(np.exp(found[..., -1]), np.exp(expected[..., -1]), rtol=0, atol=atol)


def draw_tokens(seed, num_tokens, size, k=K):
    """Tokens of each position, all different; some are the label of :func:`draw`, as the teacher's may be."""
    stream = np.random.default_rng([seed, 2])
    return np.stack([stream.permutation(size)[:k] for _ in range(num_tokens)]).astype(np.int32)


def likeliest(logprobs, k, vocab_size):
    """The k likeliest of the first tokens by a sort of (log-probability, token) pairs in Python."""
    return np.array([sorted(range(vocab_size), key=lambda word: (-row[word], word))[:k] for row in logprobs], np.int64)


def expected_gradients(hidden, weight, labels, token_ids, slopes):
    """Gradients of the slopes' products with log p(label), entropy and log p(tokens), by log-softmax's Jacobian."""
    logprobs = log_softmax(hidden, weight)
    probs, rows = np.exp(logprobs), np.arange(len(labels))
    wanted = np.zeros_like(probs)  # d result / d log p
    wanted[rows, labels] += slopes[0]
    wanted -= slopes[1][:, None] * probs * (logprobs + 1)
    others = np.ones_like(probs)
    for column in range(token_ids.shape[1]):
        wanted[rows, token_ids[:, column]] += slopes[2][:, column]
        others[rows, token_ids[:, column]] = 0
    of_rest = probs * others  # d log sum p / d log p = p / sum p
    wanted += slopes[2][:, -1:] * of_rest / of_rest.sum(axis=1, keepdims=True)
    grad_logits = wanted - probs * wanted.sum(axis=1, keepdims=True)
    return grad_logits @ weight.astype(np.float64), grad_logits.T @ hidden.astype(np.float64)


def test_kernels_of_given_tokens_equal_float64(tiles):
    inputs = draw_rows(2)
    hidden, weight, labels, mask = inputs
    token_ids, stream = draw_tokens(2, len(labels), len(weight)), np.random.default_rng(4)
    token_ids[:6, 0] = labels[:6]
    for row in range(6):  # all different, as promised
        token_ids[row, 1:] = [word for word in range(len(weight)) if word != labels[row]][: K - 1]
    *plain, found = vocabulary.forward(*inputs, token_ids)
    for ours, theirs in zip(plain, vocabulary.forward(*inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    expected = with_rest(log_softmax(hidden, weight), token_ids) * mask[:, None]
    assert_logprobs(found, expected)

    slopes = [(stream.standard_normal(mask.shape) * mask).astype(np.float32) for _ in range(2)]
    slopes.append((stream.standard_normal(found.shape) * mask[:, None]).astype(np.float32))
    slopes[0][3] = slopes[1][3] = 0  # a position with the tokens' gradients alone
    grad_weight = np.zeros_like(weight)
    given = (token_ids, found, slopes[2])
    grad_hidden = vocabulary.backward(*inputs, plain[1], plain[2], *slopes[:2], grad_weight, given)
    wanted = expected_gradients(hidden, weight, labels, token_ids, slopes)
    for name, ours, theirs in zip(("hidden", "weight"), (grad_hidden, grad_weight), wanted):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.parametrize("vocab_size", [50, 48, 7])
def test_kernel_finds_the_most_likely_tokens(tiles, vocab_size):
    inputs = draw_rows(5)
    hidden, weight, labels, mask = inputs
    logprobs, token_ids, top_k_logprobs = vocabulary.top_tokens(*inputs, K, vocab_size)
    assert (np.diff(token_ids[mask != 0]) > 0).all()
    token_ids, top_k_logprobs = likeliest_first(token_ids, top_k_logprobs)
    active, full = mask != 0, log_softmax(hidden, weight)
    np.testing.assert_array_equal(token_ids[active], likeliest(full, K, vocab_size)[active])
    assert_logprobs(top_k_logprobs[active], with_rest(full, token_ids)[active])
    np.testing.assert_array_equal(logprobs, vocabulary.forward(*inputs)[0])
    assert token_ids.dtype == np.int32 and not token_ids[~active].any() and not top_k_logprobs[~active].any()


def tied_head(size, width, seed=0):
    """Small whole numbers, whose products are exact: many tokens have equal logits."""
    return np.random.default_rng(seed).integers(-1, 2, (size, width)).astype(np.float32)


def test_kernel_breaks_ties_by_the_smallest_word(tiles):
    _, _, labels, mask = draw_rows(6)
    hidden, weight = tied_head(len(labels), 6, 1), tied_head(50, 6, 2)
    _, token_ids, logprobs = vocabulary.top_tokens(hidden, weight, labels, mask, 9, 50)
    token_ids, _ = likeliest_first(token_ids, logprobs)
    logits = hidden.astype(np.int64) @ weight.astype(np.int64).T
    expected = likeliest(logits, 9, 50)
    kth = np.take_along_axis(logits, expected[:, -1:], 1)
    assert ((logits == kth).sum(axis=1) > 1).mean() > 0.5, "no ties at the edge to be broken"
    np.testing.assert_array_equal(token_ids[mask != 0], expected[mask != 0])


@functools.cache
def policy_of(form: str, tied: bool):
    """A policy of tests that leave its weights as they are."""
    from mindrlhf.algorithms.top_k.cells import TopKLogProbs

    device, tile = FORMS[form]
    return TopKLogProbs(make_policy(device, TEMPERATURE, tied).model, TEMPERATURE, device, tile)


def run(policy, inputs, token_ids, slopes):
    """Return log-probs, entropies and tokens' log-probs, and the gradients, by parameter, of their weighted sum."""
    import mindspore as ms
    from mindspore import nn, ops

    class WeightedSum(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.policy = policy

        def construct(self, input_ids, segment_ids, labels, mask, token_ids, first, second, third):
            found = self.policy(input_ids, segment_ids, labels, mask, token_ids)
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
    arrays = (input_ids, np.ones_like(input_ids), labels, mask, token_ids, *slopes)
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
def test_cells_of_given_tokens_equal_float64(form, tied):
    policy = policy_of(form, tied)
    input_ids, labels, mask, weights = draw()
    token_ids = draw_tokens(1, ROWS * LENGTH, VOCABULARY).reshape(ROWS, LENGTH, K)
    token_ids[0, 0] = [labels[0, 0], *[word for word in range(VOCABULARY) if word != labels[0, 0]][: K - 1]]
    mask[0, 0] = 1
    third = np.random.default_rng(9).standard_normal((ROWS, LENGTH, K + 1)).astype(np.float32)
    found, gradients = run(policy, (input_ids, labels, mask), token_ids, (*weights, third))
    hidden = policy.model.table.asnumpy()[input_ids.reshape(-1)].astype(np.float64) / TEMPERATURE
    head, flat = policy.model.head_weight.asnumpy(), mask.reshape(-1)
    logprobs, entropy, _ = reference.forward(hidden, head, labels.reshape(-1), flat)
    of_given = with_rest(log_softmax(hidden, head), token_ids.reshape(-1, K)) * flat[:, None]
    for ours, theirs in zip(found, (logprobs, entropy), strict=False):
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-5)
    assert_logprobs(found[2].reshape(of_given.shape), of_given, form)
    slopes = [weights[0].reshape(-1) * flat, weights[1].reshape(-1) * flat, third.reshape(-1, K + 1) * flat[:, None]]
    grad_hidden, grad_head = expected_gradients(hidden, head, labels.reshape(-1), token_ids.reshape(-1, K), slopes)
    grad_table = np.zeros(policy.model.table.shape)
    np.add.at(grad_table, input_ids.reshape(-1), grad_hidden / TEMPERATURE)
    expected = {"table": grad_table + grad_head} if tied else {"table": grad_table, "head": grad_head}
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_without_tokens_it_is_the_plain_cell(form):
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


@pytest.mark.parametrize("vocab_size", [VOCABULARY, VOCABULARY - 3])
@pytest.mark.parametrize("form", FORMS)
def test_cells_find_the_most_likely_tokens_ties_by_the_smallest(form, vocab_size):
    import mindspore as ms

    from mindrlhf.algorithms.top_k.cells import TopTokens

    device, tile = FORMS[form]
    policy, (input_ids, labels, mask, _) = make_policy(device, 0.5), draw()
    policy.model.table.set_data(ms.Tensor(tied_head(VOCABULARY, 5, 1)))
    policy.model.head.set_data(ms.Tensor(tied_head(VOCABULARY, 5, 2)))
    cell = TopTokens(policy, 7, vocab_size, tile)
    bind(policy)
    found = cell(*map(ms.Tensor, (input_ids, np.ones_like(input_ids), labels, mask)))
    logprobs, *of_given = (one.asnumpy() for one in found)
    token_ids, top_k_logprobs = likeliest_first(*of_given)
    hidden = policy.model.table.asnumpy()[input_ids] * 2
    full, active = log_softmax(hidden, policy.model.head.asnumpy()), mask != 0
    logits = (hidden.astype(np.int64) @ policy.model.head.asnumpy().astype(np.int64).T)[active]
    expected = likeliest(logits, 7, vocab_size)
    assert token_ids.dtype == np.int32 and token_ids.shape == (ROWS, LENGTH, 7) and top_k_logprobs.dtype == np.float32
    np.testing.assert_array_equal(token_ids[active], expected)
    assert_logprobs(top_k_logprobs[active], with_rest(full[active], expected), form)
    chosen = np.take_along_axis(full, labels[..., None].astype(np.int64), 2)[..., 0]
    np.testing.assert_allclose(logprobs, chosen * mask, atol=2e-6)
    assert not token_ids[~active].any() and not top_k_logprobs[~active].any()
