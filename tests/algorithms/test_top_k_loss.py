"""The KL against a teacher's top-k tokens: its formula in float64, its bounds, the gradient of the whole loss."""

import functools

import numpy as np
import pytest
from head_hooks import bind, collect_weight_gradient, graph_parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from test_logprobs import LENGTH, ROWS, VOCABULARY, draw, make_policy
from test_top_k_tokens import with_rest

from mindrlhf.algorithms.head import LEAST_REST, WHOLE_HEAD, HeadTile
from mindrlhf.cpu.training import vocabulary

K, TEMPERATURE, KL_COEFFICIENT, NUM_TOKENS = 5, 0.7, 0.6, 9.0
SMALL = 7  # tokens of the distributions that are drawn


def log_softmax(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def likeliest(teacher, k):
    return np.argsort(-teacher, axis=-1, kind="stable")[..., :k]


def merged(student, teacher, k, token_ids=None):
    """KL after all but k tokens became one, from whole float64 log-probabilities; a sum over those that are left."""
    token_ids = likeliest(teacher, k) if token_ids is None else token_ids
    chosen = np.zeros(student.shape, bool)
    np.put_along_axis(chosen, token_ids, True, axis=-1)
    total = np.where(chosen, np.exp(student) * (student - teacher), 0.0).sum(axis=-1)
    rest = [np.where(chosen, 0.0, np.exp(one)).sum(axis=-1) for one in (student, teacher)]
    return total + rest[0] * np.log(rest[0] / rest[1])


def of_product(student, teacher, k):
    """What the kernels of the head and the loss make of logits [rows, tokens]: the KL and both masses, [rows] each."""
    import mindspore as ms

    from mindrlhf.algorithms.top_k.loss import merged_kl

    # Hidden states are the logits where the head is the identity.
    others = (np.eye(SMALL, dtype=np.float32), np.zeros(len(student), np.int32), np.ones(len(student), np.float32))
    _, token_ids, of_teacher = vocabulary.top_tokens(teacher.astype(np.float32), *others, k, SMALL)
    of_student = vocabulary.forward(student.astype(np.float32), *others, token_ids)[3]
    return [one.asnumpy()[0] for one in merged_kl(ms.Tensor(of_student[None]), ms.Tensor(of_teacher[None]))]


def pair(seed, spread=3.0, rows=6):
    return np.random.default_rng(seed).uniform(-spread, spread, (2, rows, SMALL)).astype(np.float32).astype(float)


@pytest.mark.parametrize("k", [1, 3, SMALL - 1])
def test_the_kl_and_both_masses_are_those_of_the_formula(k):
    student, teacher = pair(1)
    token_ids = likeliest(teacher, k)
    kl, mass, teacher_mass = of_product(student, teacher, k)
    np.testing.assert_allclose(kl, merged(log_softmax(student), log_softmax(teacher), k), rtol=2e-4, atol=1e-6)
    for found, logits in ((mass, student), (teacher_mass, teacher)):
        wanted = np.exp(np.take_along_axis(log_softmax(logits), token_ids, -1)).sum(-1)
        np.testing.assert_allclose(found, wanted, rtol=3e-6)


def test_with_all_tokens_but_one_it_is_the_whole_reverse_kl():
    student, teacher = pair(2)
    logprobs = log_softmax(student)
    whole = (np.exp(logprobs) * (logprobs - log_softmax(teacher))).sum(axis=-1)
    assert whole.min() > 0.05
    np.testing.assert_allclose(of_product(student, teacher, SMALL - 1)[0], whole, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0.0, 3.0))
def test_it_is_a_lower_bound_that_grows_with_the_tokens(seed, spread):
    student, teacher = pair(seed, spread)
    logprobs = log_softmax(student)
    whole = (np.exp(logprobs) * (logprobs - log_softmax(teacher))).sum(axis=-1)
    bounds = [of_product(student, teacher, k)[0] for k in range(1, SMALL)]
    for lower, upper in zip([np.zeros_like(whole), *bounds], [*bounds, whole]):
        assert (lower <= upper + 5e-4).all()


def test_the_rest_has_a_least_mass_below_which_it_has_no_gradient():
    """Tokens that have all of the probability, to float32, beside ones that have not: in NumPy and in graphs."""
    import mindspore as ms
    from mindspore import ops

    from mindrlhf.algorithms.chunked_head import with_rest

    logits = np.array([[30.0, 0, 0, 0, 0, 0, 0], [3.0, 2, 1, 0, 0, 0, 0]], np.float32)
    head, labels, mask = np.eye(SMALL, dtype=np.float32), np.zeros(2, np.int32), np.ones(2, np.float32)
    token_ids = np.array([[0, 1], [0, 1]], np.int32)
    full = log_softmax(logits.astype(np.float64))
    rest = np.exp(full[1, 2:]).sum()
    _, entropy, log_normaliser, found = vocabulary.forward(logits, head, labels, mask, token_ids)
    expected = [[*full[0, :2], np.log(LEAST_REST)], [*full[1, :2], np.log(rest)]]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    slopes = np.array([[0, 0, 1], [0, 0, 1]], np.float32)
    unread = np.zeros(2, np.float32)
    given = (token_ids, found, slopes)
    grad = vocabulary.backward(logits, head, labels, mask, entropy, log_normaliser, unread, unread, None, given)
    assert not grad[0].any()
    probs = np.exp(full[1])
    np.testing.assert_allclose(grad[1], [*-probs[:2], *(probs[2:] / rest - probs[2:])], rtol=1e-4, atol=1e-6)

    def last(logprobs):
        return with_rest(logprobs)[:, -1].sum(), with_rest(logprobs)

    given = ms.Tensor(full[:, :2].astype(np.float32))
    (_, in_graph), slope = ops.value_and_grad(last, 0, has_aux=True)(given)
    np.testing.assert_allclose(in_graph.asnumpy(), expected, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(slope.asnumpy(), [[0, 0], -probs[:2] / rest], rtol=1e-4)


@functools.cache
def gradients_of(form: str):
    """The loss over an embedding as the model, and its gradients."""
    import mindspore as ms

    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.top_k.cells import TopKLogProbs
    from mindrlhf.algorithms.top_k.loss import TopKPolicyLoss

    device, tile = {"cpu": ("cpu", WHOLE_HEAD), "chunked": ("ascend", HeadTile(11, 15))}[form]
    policy = TopKLogProbs(make_policy(device, TEMPERATURE).model, TEMPERATURE, device, tile)
    surrogate = policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.2)
    loss = TopKPolicyLoss(policy, surrogate, K, on_policy=True)
    parameters = ms.ParameterTuple(graph_parameters(policy))
    return loss, ms.value_and_grad(loss, None, parameters, has_aux=True)


def objective(table, head, given, old):
    """The loss in float64, from whole distributions, and the KL; ``old`` are the log-probabilities of the labels."""
    input_ids, labels, mask, advantages, weights, token_ids, teacher = given
    full = log_softmax(table[input_ids] @ head.T / TEMPERATURE)
    chosen = np.take_along_axis(full, labels[..., None].astype(np.int64), -1)[..., 0]
    per_token = -advantages * np.exp(chosen - old)
    kl = merged(full, teacher, K, token_ids)
    return (weights * mask * (per_token + KL_COEFFICIENT * kl)).sum() / NUM_TOKENS, (mask * kl).sum()


@pytest.mark.parametrize("form", ["cpu", "chunked"])
def test_the_whole_loss_and_its_gradient_equal_float64(form):
    import mindspore as ms

    loss, function = gradients_of(form)
    model, stream = loss.policy.model, np.random.default_rng(11)
    input_ids, labels, mask, (advantages, weights) = draw()
    teacher = log_softmax(1.5 * stream.standard_normal((ROWS, LENGTH, VOCABULARY)))
    token_ids = likeliest(teacher, K)
    given = {
        "advantages": advantages,
        "weights": weights * mask,
        "teacher_tokens": (token_ids * mask[..., None]).astype(np.int32),
        "teacher_logprobs": (with_rest(teacher, token_ids) * mask[..., None]).astype(np.float32),
    }
    arrays = (input_ids, np.ones_like(input_ids), labels, mask, *loss.token_arrays(given, mask))
    scalars = (ms.Tensor(KL_COEFFICIENT, ms.float32), ms.Tensor(NUM_TOKENS, ms.float32))
    bind(loss.policy)
    (value, statistics, _), slopes = function(*map(ms.Tensor, arrays), *scalars)
    named = dict(zip(loss.statistics, statistics.asnumpy(), strict=True))
    gradients = {one.name: slope.asnumpy() for one, slope in zip(graph_parameters(loss.policy), slopes)}
    outside = np.zeros(model.head.shape, np.float32)
    collect_weight_gradient(loss.policy, outside)
    gradients["head"] = gradients.get("head", 0.0) + outside

    start = {name: getattr(model, name).asnumpy().astype(np.float64) for name in ("table", "head")}
    full = log_softmax(start["table"][input_ids] @ start["head"].T / TEMPERATURE)
    old = np.take_along_axis(full, labels[..., None].astype(np.int64), -1)[..., 0]
    of_float64 = functools.partial(
        objective, given=(input_ids, labels, mask, advantages, weights, token_ids, teacher), old=old
    )
    expected, kl = of_float64(**start)
    assert float(value.asnumpy()) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert named["loss"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert named["topk_kl"] == pytest.approx(kl, rel=1e-5)
    for name, logprobs in (("student_mass", full), ("teacher_mass", teacher)):
        mass = np.exp(np.take_along_axis(logprobs, token_ids, -1)).sum(-1)
        assert named[name] == pytest.approx((mass * mask).sum(), rel=1e-5)
    for name, at in start.items():
        for _ in range(4):
            direction = stream.standard_normal(at.shape)
            values = [of_float64(**{**start, name: at + step * direction})[0] for step in (1e-6, -1e-6)]
            slope = (values[0] - values[1]) / 2e-6
            assert (gradients[name] * direction).sum() == pytest.approx(slope, rel=1e-3, abs=1e-4), name


def test_what_rows_lack_is_zero_and_of_the_shape_of_the_graph():
    loss, _ = gradients_of("cpu")
    arrays = loss.token_arrays({"advantages": np.ones((2, 3), np.float32)}, np.ones((2, 3), np.float32))
    assert [array.shape for array in arrays] == [(2, 3)] * 5 + [(2, 3, K), (2, 3, K + 1)]
    assert [array.dtype for array in arrays[-2:]] == [np.int32, np.float32]
    assert arrays[0].all() and not any(array.any() for array in arrays[1:])
