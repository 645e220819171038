"""What is added to a policy loss: KL, entropy, off-policy correction; and the supervised loss."""

import numpy as np
import policy_loss_cases as cases
import policy_loss_references as references
import pytest
from slow_tests import RUNS_SLOW_TESTS, SLOW

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
KL_COEFFICIENT = 0.3
CORRECTIONS = {
    "token truncation": {"weight": "token", "max_weight": 1.3},
    "IcePop": {"weight": "token", "max_weight": 5.0, "mask": "token", "mask_low": 0.6, "mask_high": 1.5},
    "sequence mask": {"weight": "token", "max_weight": 1.3, "mask": "sequence", "mask_low": 0.3, "mask_high": 3.0},
    "geometric mask": {"mask": "geometric", "mask_low": 0.9, "mask_high": 1.2},
    "veto": {"weight": "sequence", "max_weight": 2.0, "veto": 0.4},
    "off-policy mask": {"weight": "token", "max_weight": 1.3, "drift": 0.05},
}
if RUNS_SLOW_TESTS:  # a part of the last one
    CORRECTIONS["sequence truncation"] = {"weight": "sequence", "max_weight": 1.5}


def full(correction: dict) -> dict:
    plain = {"weight": "none", "max_weight": 2.0, "mask": "none", "mask_low": 0.5, "mask_high": 2.0, "veto": 0.0}
    return {**plain, **correction}


def objective(responses, *, on_policy=False, kl_estimator="", kl_unbiased=False, correction=None, mode="token_mean"):
    def value(logprobs):
        losses = []
        for new, item in zip(logprobs, responses):
            old = item.logprobs if on_policy else item.old
            part = references.ppo_clip(new, item.logprobs, old, item.advantages, **CLIP)
            if correction is not None:
                part = part * references.correction(item, old, **correction)
            if kl_estimator:
                kl = references.kl(kl_estimator, new, item.reference)
                part = part + KL_COEFFICIENT * (kl * np.exp(new) / np.exp(old) if kl_unbiased else kl)
            losses.append(part)
        return references.aggregate(losses, mode, cases.MAX_RESPONSE_LENGTH)

    return value


def check(responses, expected, **options):
    value, statistics, gradient, _ = cases.run(responses, "ppo_clip", options=CLIP, **options)
    assert value == pytest.approx(expected([item.logprobs for item in responses]), rel=1e-5, abs=1e-7)
    cases.assert_close(gradient, cases.central_differences(expected, [item.logprobs for item in responses]))
    return statistics


@pytest.mark.parametrize(
    ("estimator", "unbiased", "on_policy"),
    [
        ("k1", False, False),
        ("k2", False, False),
        ("k3", False, False),
        ("abs", False, False),
        ("k1", True, False),
        ("k3", True, False),
        pytest.param("k3", False, True, marks=SLOW),
        ("k3", True, True),
    ],
)
def test_kl_equals_the_formula_in_value_and_gradient(estimator, unbiased, on_policy):
    responses = cases.draw(21)
    options = {"kl_estimator": estimator, "kl_unbiased": unbiased, "on_policy": on_policy}
    statistics = check(responses, objective(responses, **options), kl_coefficient=KL_COEFFICIENT, **options)
    kl = sum(references.kl(estimator, item.logprobs, item.reference).sum() for item in responses)
    assert statistics["kl"] == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_gradient_is_that_of_the_kl_divergence(estimator):
    """Exactly, by summing over a vocabulary of three: one token, softmax logits, every outcome with its probability."""
    logits, reference = np.array([0.3, -1.1, 0.8]), np.array([-0.4, 0.2, 0.5])
    log_old = np.log(np.array([0.5, 0.2, 0.3]))  # the samples are from another policy

    def log_softmax(values):
        return values - np.log(np.exp(values).sum())

    log_reference = log_softmax(reference)
    probabilities = np.exp(log_softmax(logits))
    kl = (probabilities * (log_softmax(logits) - log_reference)).sum()
    true = probabilities * (log_softmax(logits) - log_reference - kl)
    estimate, value = np.zeros(3), 0.0
    for token in range(3):
        item = cases.draw(0, lengths=(1,))[0]
        item.logprobs[:], item.old[:] = log_softmax(logits)[token], log_old[token]
        item.reference[:], item.advantages[:] = log_reference[token], 0.0
        loss, _, gradient, _ = cases.run(
            [item], "ppo_clip", options=CLIP, kl_coefficient=1.0, kl_estimator=estimator, kl_unbiased=True
        )
        value += np.exp(log_old[token]) * loss
        estimate += np.exp(log_old[token]) * gradient[0][0] * (np.eye(3)[token] - probabilities)
    assert value == pytest.approx(kl, rel=1e-5)
    np.testing.assert_allclose(estimate, true, rtol=1e-4, atol=1e-6)


def test_without_kl_the_reference_is_never_read():
    responses, broken = cases.draw(22), cases.draw(22)
    for item in broken:
        item.reference[:] = item.rollout[:] = np.nan
    expected, actual = (cases.run(each, "ppo_clip", options=CLIP) for each in (responses, broken))
    assert actual[:2] == expected[:2]


def test_a_token_far_from_the_reference_leaves_everything_finite():
    responses = cases.draw(23)
    responses[0].reference[0] += 200.0
    loss, _, gradient, _ = cases.run(
        responses, "ppo_clip", options=CLIP, kl_coefficient=0.1, kl_estimator="k3", kl_unbiased=False
    )
    assert np.isfinite(loss) and all(np.isfinite(part).all() for part in gradient)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "sequence_sum"])
def test_the_entropy_bonus_is_aggregated_like_the_loss(mode):
    responses = cases.draw(24)
    plain = cases.run(responses, "ppo_clip", options=CLIP, mode=mode)
    loss, statistics, _, by_entropy = cases.run(responses, "ppo_clip", options=CLIP, mode=mode, entropy_coefficient=0.2)
    entropies = [item.entropy for item in responses]
    mean = references.aggregate(entropies, mode, cases.MAX_RESPONSE_LENGTH)
    assert loss == pytest.approx(plain[0] - 0.2 * mean, rel=1e-5)
    assert statistics["entropy"] == pytest.approx(np.concatenate(entropies).sum(), rel=1e-6)
    weights = cases.weights_of(responses, mode) / sum(map(len, responses))
    cases.assert_close(by_entropy, [np.full(len(item), -0.2 * weight) for item, weight in zip(responses, weights)])


@pytest.mark.parametrize(
    ("name", "on_policy"),
    [*((name, False) for name in CORRECTIONS), ("token truncation", True), pytest.param("veto", True, marks=SLOW)],
)
def test_corrections_equal_the_formula(name, on_policy):
    responses = cases.draw(25)
    correction = CORRECTIONS[name]
    expected = objective(responses, on_policy=on_policy, correction=correction)
    statistics = check(responses, expected, on_policy=on_policy, correction=full(correction))
    weights, untouched = [], []
    for item in responses:
        old = item.logprobs if on_policy else item.old
        weights.append(references.correction(item, old, **correction))
        ratio = {"weight": correction.get("weight", "none"), "max_weight": np.inf}
        untouched.append(references.correction(item, old, **ratio))
    changed = np.abs(np.concatenate(weights) - np.concatenate(untouched)) > 1e-9
    assert statistics["correction"] == pytest.approx(np.concatenate(weights).sum(), rel=1e-5)
    assert statistics["corrected"] == changed.sum()
    assert 0 < changed.sum() < changed.size


@pytest.mark.parametrize(
    "name", [name for name in ("sequence truncation", "geometric mask", "veto") if name in CORRECTIONS]
)
@pytest.mark.parametrize("num_rows", [8, pytest.param(1, marks=SLOW)])  # 8: graphs that are compiled already
def test_corrections_do_not_depend_on_the_cutting(name, num_rows):
    from mindrlhf.training.batch import RowOptions

    responses = cases.draw(26)
    options = {"options": CLIP, "correction": full(CORRECTIONS[name])}
    plain = cases.run(responses, "ppo_clip", **options)
    for rows in (RowOptions((cases.LONGEST,), num_rows, 1, False), RowOptions((cases.LONGEST,), num_rows, 4, True)):
        cut = cases.run(responses, "ppo_clip", rows=rows, **options)
        assert cut[1] == pytest.approx(plain[1], rel=1e-5, abs=1e-6)
        cases.assert_close(cut[2], plain[2], rtol=1e-6)


def test_equal_policies_are_not_corrected():
    responses = cases.draw(27)
    for item in responses:
        item.rollout[:] = item.old
    plain = cases.run(responses, "ppo_clip", options=CLIP)
    for correction in CORRECTIONS.values():
        _, statistics, gradient, _ = cases.run(responses, "ppo_clip", options=CLIP, correction=full(correction))
        assert statistics["corrected"] == 0
        assert statistics["correction"] == sum(map(len, responses))
        cases.assert_close(gradient, plain[2], rtol=1e-6)


def test_the_mean_of_a_sequence_leaves_out_what_is_no_response():
    import mindspore as ms

    from mindrlhf.algorithms.sequences import sequence_means

    values, mask = np.array([[9.0, 1.0, 3.0, 9.0, 5.0, 9.0]]), np.array([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    means = sequence_means(*(ms.Tensor(one, ms.float32) for one in (values, mask)), ms.Tensor([[1, 1, 1, 2, 2, 0]]))
    assert means.asnumpy().tolist() == [[2.0, 2.0, 2.0, 5.0, 5.0, 0.0]]


def test_supervised_loss_is_the_mean_negative_log_likelihood():
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.algorithms.losses import SupervisedLoss

    stream = np.random.default_rng(19)
    drawn = -stream.exponential(1.0, (3, 8)).astype(np.float32)
    mask = (stream.random((3, 8)) < 0.7).astype(np.float32)
    entropy, num_tokens = stream.random((3, 8)).astype(np.float32) * mask, 37

    class Policy(nn.Cell):
        def __init__(self):
            super().__init__()
            self.logprobs = ms.Parameter(drawn, name="logprobs")

        def construct(self, input_ids, segment_ids, labels, mask):
            return self.logprobs * mask, ms.Tensor(entropy)

    policy = Policy()
    function = ms.value_and_grad(SupervisedLoss(policy), None, ms.ParameterTuple([policy.logprobs]), has_aux=True)
    ids = np.zeros((3, 8), np.int32)
    outputs, gradients = function(*map(ms.Tensor, (ids, ids, ids, mask)), ms.Tensor(num_tokens, ms.float32))
    expected = -(drawn.astype(np.float64) * mask).sum() / num_tokens
    assert float(outputs[0]) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(outputs[1].asnumpy(), [expected, entropy.sum(dtype=np.float64)], rtol=1e-5)
    np.testing.assert_array_equal(outputs[2].asnumpy(), drawn * mask)
    np.testing.assert_allclose(gradients[0].asnumpy(), -mask / num_tokens, rtol=1e-6)


def test_a_loss_that_an_npu_could_not_compile_is_refused_on_a_cpu_too():
    from mindrlhf.algorithms.losses import MOST_INPUTS, Loss

    class Wide(Loss):
        inputs = tuple("abcdefg")

    assert len(Wide.inputs) > MOST_INPUTS
    with pytest.raises(AssertionError, match="Wide reads 7 token arrays"):
        Wide(policy=None)
