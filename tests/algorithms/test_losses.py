"""The losses against float64 NumPy written from the papers; gradients against central differences of it."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ROWS, LENGTH = 3, 8


class Case:
    """Random arrays of one micro-batch: the log-probs stray far enough from the old ones for both clips to bite."""

    def __init__(self, seed: int, rows: int = ROWS):
        stream = np.random.default_rng(seed)
        shape = (rows, LENGTH)
        self.mask = (stream.random(shape) < 0.7).astype(np.float32)
        self.mask[0, 0] = 1
        self.advantages = (stream.standard_normal(shape) * self.mask).astype(np.float32)
        self.logprobs = -stream.exponential(1.0, shape).astype(np.float32)
        self.old = (self.logprobs + 0.4 * stream.standard_normal(shape)).astype(np.float32) * self.mask
        self.reference = (self.logprobs + 0.5 * stream.standard_normal(shape)).astype(np.float32) * self.mask
        self.entropy = stream.random(shape).astype(np.float32) * self.mask
        self.num_tokens = 37  # of the whole update, of which this micro-batch is a part


def objective(case, logprobs, old, beta, clip_low=CLIP_LOW, clip_high=CLIP_HIGH):
    """The loss, token by token: GRPO eq. 3 and 4 (arXiv:2402.03300), DAPO eq. 8 and 10 (arXiv:2503.14476)."""
    total = 0.0
    for place in np.argwhere(case.mask):
        row, position = place
        ratio = np.exp(float(logprobs[row, position]) - float(old[row, position]))
        advantage = float(case.advantages[row, position])
        clipped = min(max(ratio, 1.0 - clip_low), 1.0 + clip_high)
        surrogate = min(ratio * advantage, clipped * advantage)
        quotient = np.exp(float(case.reference[row, position]) - float(logprobs[row, position]))
        kl = quotient - np.log(quotient) - 1.0
        total += surrogate - beta * kl
    return -total / case.num_tokens


def central_differences(case, old, beta, **clip):
    """Gradient of ``objective`` by the log-probs, ``old`` held where it is."""
    step = 1e-6
    gradient = np.zeros(case.mask.shape)
    for place in map(tuple, np.argwhere(case.mask)):
        values = []
        for shift in (step, -step):
            shifted = case.logprobs.astype(np.float64)
            shifted[place] += shift
            values.append(objective(case, shifted, old, beta, **clip))
        gradient[place] = (values[0] - values[1]) / (2 * step)
    return gradient


@functools.cache
def compiled(rows: int, loss_name: str, **options):
    """Return a stand-in policy, whose log-probs are a parameter, and the gradient function of a loss over it."""
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.algorithms import losses

    class Policy(nn.Cell):
        def __init__(self):
            super().__init__()
            zeros = np.zeros((rows, LENGTH), np.float32)
            self.logprobs = ms.Parameter(zeros, name="logprobs")
            self.entropy = ms.Parameter(zeros, name="entropy")

        def construct(self, input_ids, segment_ids, labels, mask):
            return self.logprobs * mask, self.entropy

    policy = Policy()
    loss = getattr(losses, loss_name)(policy, **options)
    return policy, ms.value_and_grad(loss, None, ms.ParameterTuple([policy.logprobs]), has_aux=True)


def run(case, further, loss_name, **options):
    """Return loss, statistics, returned log-probs and the gradient by the log-probs."""
    import mindspore as ms

    policy, function = compiled(len(case.mask), loss_name, **options)
    policy.logprobs.set_data(ms.Tensor(case.logprobs))
    policy.entropy.set_data(ms.Tensor(case.entropy))
    ids = np.zeros(case.mask.shape, np.int32)
    arrays = (ids, ids, ids, case.mask, *further)
    (loss, statistics, logprobs), gradients = function(*map(ms.Tensor, arrays), ms.Tensor(case.num_tokens, ms.float32))
    return float(loss), statistics.asnumpy(), logprobs.asnumpy(), gradients[0].asnumpy()


def run_grpo(case, **options):
    options = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, **options}
    return run(case, (case.advantages, case.old, case.reference), "GrpoLoss", **options)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("on_policy", [False, True], ids=["off-policy", "on-policy"])
def test_value_and_gradient_equal_the_papers(on_policy, beta):
    case = Case(seed=11)
    old = case.logprobs if on_policy else case.old
    loss, _, logprobs, gradient = run_grpo(case, beta=beta, on_policy=on_policy)
    assert loss == pytest.approx(objective(case, case.logprobs, old, beta), rel=1e-5, abs=1e-7)
    np.testing.assert_allclose(gradient, central_differences(case, old, beta), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(logprobs, case.logprobs * case.mask)


def test_on_policy_never_reads_the_old_logprobs():
    case = Case(seed=12)
    expected = run_grpo(case, beta=0.0, on_policy=True)
    case.old = np.full_like(case.old, np.nan)
    for ours, theirs in zip(run_grpo(case, beta=0.0, on_policy=True), expected):
        np.testing.assert_array_equal(ours, theirs)


def test_without_beta_the_reference_is_never_read():
    case = Case(seed=13)
    expected = run_grpo(case, beta=0.0, on_policy=False)
    case.reference = np.full_like(case.reference, np.nan)
    for ours, theirs in zip(run_grpo(case, beta=0.0, on_policy=False), expected):
        np.testing.assert_array_equal(ours, theirs)


def test_statistics_are_sums_over_response_tokens():
    from mindrlhf.algorithms.losses import POLICY_STATISTICS

    case = Case(seed=14)
    loss, statistics, _, _ = run_grpo(case, beta=0.1, on_policy=False)
    named = dict(zip(POLICY_STATISTICS, statistics))
    active = case.mask.astype(bool)
    log_ratio = (case.logprobs.astype(np.float64) - case.old)[active]
    advantages = case.advantages[active]
    low = (np.exp(log_ratio) < 1 - CLIP_LOW) & (advantages < 0)
    high = (np.exp(log_ratio) > 1 + CLIP_HIGH) & (advantages > 0)
    assert low.any() and high.any()
    difference = (case.reference.astype(np.float64) - case.logprobs)[active]
    assert set(named) == {"loss", "clipped_low", "clipped_high", "kl", "entropy"}
    assert named["loss"] == pytest.approx(loss, rel=1e-6)
    assert named["clipped_low"] == low.sum()
    assert named["clipped_high"] == high.sum()
    assert named["kl"] == pytest.approx((np.exp(difference) - difference - 1).sum(), rel=1e-5)
    assert named["entropy"] == pytest.approx(case.entropy.sum(dtype=np.float64), rel=1e-6)


def test_the_gradient_is_zero_exactly_where_the_clip_bites():
    case = Case(seed=15)
    gradient = run_grpo(case, beta=0.0, on_policy=False)[3]
    log_ratio = case.logprobs.astype(np.float64) - case.old
    bites = ((log_ratio < np.log(1 - CLIP_LOW)) & (case.advantages < 0)) | (
        (log_ratio > np.log(1 + CLIP_HIGH)) & (case.advantages > 0)
    )
    silent = bites | (case.mask == 0) | (case.advantages == 0)
    assert (bites & (case.mask == 1)).any()
    np.testing.assert_array_equal(gradient == 0, silent)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000))
def test_value_equals_the_papers_on_random_data(seed):
    case = Case(seed)
    for on_policy, old in ((True, case.logprobs), (False, case.old)):
        loss = run_grpo(case, beta=0.04, on_policy=on_policy)[0]
        assert loss == pytest.approx(objective(case, case.logprobs, old, 0.04), rel=1e-4, abs=1e-6)


def test_a_padding_row_adds_nothing():
    case, longer = Case(seed=16), Case(seed=16, rows=ROWS)
    for name in ("mask", "advantages", "logprobs", "old", "reference", "entropy"):
        padded = np.concatenate([getattr(case, name), np.zeros((2, LENGTH), np.float32)])
        setattr(longer, name, padded)
    expected, actual = (run_grpo(each, beta=0.1, on_policy=False) for each in (case, longer))
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)
    np.testing.assert_allclose(actual[3][:ROWS], expected[3], rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(actual[3][ROWS:], 0)


@pytest.mark.parametrize(("clip_low", "clip_high"), [(0.0, 0.28), (0.2, 0.0), (0.0, 0.0)])
def test_a_clip_of_width_zero_leaves_the_first_update_whole(clip_low, clip_high):
    """At ratio 1 nothing is outside the clip, so the gradient is that of -A log p whatever the widths."""
    case = Case(seed=17)
    gradient = run_grpo(case, beta=0.0, on_policy=True, clip_low=clip_low, clip_high=clip_high)[3]
    np.testing.assert_allclose(gradient, -case.advantages * case.mask / case.num_tokens, rtol=1e-5, atol=1e-9)


def test_a_clipped_ratio_too_large_for_float32_gives_no_gradient():
    """exp(100) is infinite in float32, but the token is clipped: it has the value of the bound and no slope."""
    case = Case(seed=18)
    case.mask[:], case.advantages[:], case.old[:] = 1, 1, case.logprobs
    case.old[1, 2] -= 100
    loss, _, _, gradient = run_grpo(case, beta=0.0, on_policy=False)
    assert loss == pytest.approx(objective(case, case.logprobs, case.old, 0.0), rel=1e-5)
    assert gradient[1, 2] == 0
    assert np.isfinite(gradient).all()


def test_supervised_loss_is_the_mean_negative_log_likelihood():
    case = Case(seed=19)
    loss, statistics, logprobs, gradient = run(case, (), "SupervisedLoss")
    expected = -(case.logprobs.astype(np.float64) * case.mask).sum() / case.num_tokens
    assert loss == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(statistics, [expected, case.entropy.sum(dtype=np.float64)], rtol=1e-5)
    np.testing.assert_array_equal(logprobs, case.logprobs * case.mask)
    np.testing.assert_allclose(gradient, -case.mask / case.num_tokens, rtol=1e-6)
