"""Every policy loss against float64 NumPy written from its paper; gradients against central differences of it."""

import numpy as np
import policy_loss_cases as cases
import policy_loss_references as references
import pytest
from slow_tests import RUNS_SLOW_TESTS, SLOW

from mindrlhf.algorithms import policy_losses
from mindrlhf.config.algorithm import PRESETS
from mindrlhf.training.batch import RowOptions

OPTIONS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.6},
    "gspo": {"clip_low": 0.05, "clip_high": 0.07},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.07},
    "sequence_clip": {"clip_low": 0.3, "clip_high": 0.4},
    "cispo": {"clip_low": 0.3, "clip_high": 0.5},
    "sapo": {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05},
    "reinforce": {},
    "kimi": {"mirror_tau": 0.3},
    "dppo_tv": {"clip_low": 0.05, "clip_high": 0.07},
    "dppo_kl": {"clip_low": 0.02, "clip_high": 0.03},
    "gmpo": {"clip_low": 0.3, "clip_high": 0.4},
    "vespo": {
        "vespo_k_positive": 2.0,
        "vespo_lambda_positive": 3.0,
        "vespo_k_negative": 3.0,
        "vespo_lambda_negative": 2.0,
    },
}
# Their one loss per response needs one advantage per response.
CONSTANT_ADVANTAGES = ("gmpo", "gspo", "sequence_clip", "vespo")
# Of the shape that the other tests have, whose graphs are compiled already: ranks whose rows are partly empty.
CUTTINGS = {
    "one response a row": RowOptions((cases.LONGEST,), 8, 1, False),
    "two ranks": RowOptions((cases.LONGEST,), 8, 2, True),
    "four ranks": RowOptions((cases.LONGEST,), 8, 4, False),
}
# By day only of the loss that sums over the rows of a graph in every way that there is.
CUTTINGS_INTO_ROWS = {
    "packed, one row": RowOptions((cases.LONGEST,), 1, 1, True),
    "two ranks, one row": RowOptions((cases.LONGEST,), 1, 2, True),
    "four ranks, one row": RowOptions((cases.LONGEST,), 1, 4, False),
}
BY_ROWS = "gspo_token"
# What is on-policy is one operation before every loss: by day one that has the ratio of tokens, of a response, and
# none; the others have the old log-probs as an input, which are then the new ones.
ON_POLICY = ("ppo_clip", "gspo", "kimi")


def draw(loss, seed=3, **more):
    responses = cases.draw(seed, constant=loss in CONSTANT_ADVANTAGES, **more)
    if loss.startswith("dppo"):  # which reads the probabilities themselves
        for item in responses:
            item.old[:] = np.minimum(item.old, np.float32(-0.05))
    return responses


def objective(loss, responses, mode, on_policy=False):
    """Return the reference as a function of the log-probs."""
    function, options = getattr(references, loss), OPTIONS[loss]

    def value(logprobs):
        losses = [
            function(new, item.logprobs, item.logprobs if on_policy else item.old, item.advantages, **options)
            for new, item in zip(logprobs, responses)
        ]
        return references.aggregate(losses, mode, cases.MAX_RESPONSE_LENGTH)

    return value


def test_every_loss_is_tested():
    assert set(OPTIONS) == set(policy_losses.names())
    for name, options in OPTIONS.items():
        assert (*policy_losses.traits(name).keys, *policy_losses.traits(name).options) == tuple(options)


@pytest.mark.parametrize(
    "loss, on_policy",
    [
        pytest.param(loss, on_policy, marks=[SLOW] if on_policy and loss not in ON_POLICY else [])
        for loss in OPTIONS
        for on_policy in (False, True)
    ],
)
def test_value_and_gradient_equal_the_paper(loss, on_policy):
    # kimi's square of a whole response is one number per response only when summed.
    for mode in ("sequence_sum",) if loss == "kimi" else ("sequence_mean", "token_mean"):
        responses = draw(loss)
        expected = objective(loss, responses, mode, on_policy)
        value, _, gradient, _ = cases.run(responses, loss, mode=mode, on_policy=on_policy, options=OPTIONS[loss])
        assert value == pytest.approx(expected([item.logprobs for item in responses]), rel=1e-5, abs=1e-7)
        cases.assert_close(gradient, cases.central_differences(expected, [item.logprobs for item in responses]))


@pytest.mark.parametrize(
    "loss, rows",
    [pytest.param(loss, rows, id=f"{loss}-{name}") for loss in OPTIONS for name, rows in CUTTINGS.items()]
    + [
        pytest.param(loss, rows, id=f"{loss}-{name}", marks=[] if loss == BY_ROWS else [SLOW])
        for loss in OPTIONS
        for name, rows in CUTTINGS_INTO_ROWS.items()
    ],
)
def test_the_cutting_of_a_batch_changes_nothing(loss, rows):
    responses = draw(loss, seed=4)
    plain = cases.run(responses, loss, mode="sequence_mean", options=OPTIONS[loss])
    cut = cases.run(responses, loss, mode="sequence_mean", options=OPTIONS[loss], rows=rows)
    assert cut[0] == pytest.approx(plain[0], rel=1e-5, abs=1e-7)
    assert cut[1] == pytest.approx(plain[1], rel=1e-5, abs=1e-6)
    cases.assert_close(cut[2], plain[2], rtol=1e-6)


@pytest.mark.parametrize("loss", ["ppo_clip", "dual_clip", "gspo", "sequence_clip", "gmpo", "dppo_tv"])
def test_clipped_tokens_are_counted_and_have_no_gradient(loss):
    responses = draw(loss, seed=6, spread=0.8, lengths=[1, 2, 3, 4] * 6)
    _, statistics, gradient, _ = cases.run(responses, loss, options=OPTIONS[loss])
    low = high = 0
    lower, upper = 1 - OPTIONS[loss]["clip_low"], 1 + OPTIONS[loss]["clip_high"]
    for item, slopes in zip(responses, gradient):
        log_ratio = item.logprobs - item.old
        if loss == "gspo":
            log_ratio = np.full(len(item), log_ratio.mean())
        elif loss == "sequence_clip":
            log_ratio = np.full(len(item), log_ratio.sum())
        ratio = np.exp(log_ratio)
        if loss == "gmpo":
            ratio = 1 + log_ratio
        elif loss == "dppo_tv":
            ratio = 1 + np.exp(item.logprobs) - np.exp(item.old)
        is_low, is_high = (ratio < lower) & (item.advantages < 0), (ratio > upper) & (item.advantages > 0)
        if loss == "dual_clip":
            is_high |= (ratio > OPTIONS[loss]["dual_clip"]) & (item.advantages < 0)
        np.testing.assert_array_equal(slopes == 0, is_low | is_high)
        low, high = low + is_low.sum(), high + is_high.sum()
    assert low > 0 and high > 0
    assert (statistics["clipped_low"], statistics["clipped_high"]) == (low, high)


def test_cispo_counts_what_it_bounds_and_keeps_its_gradient():
    responses = draw("cispo", seed=7, spread=0.8)
    _, statistics, gradient, _ = cases.run(responses, "cispo", options=OPTIONS["cispo"])
    ratio = np.exp(np.concatenate([item.logprobs - item.old for item in responses]))
    assert statistics["clipped_low"] == (ratio < 0.7).sum() > 0
    assert statistics["clipped_high"] == (ratio > 1.5).sum() > 0
    assert np.concatenate(gradient).all()


def test_luspo_is_gspo_whose_responses_count_by_their_lengths():
    """The preset's loss and aggregation, times the fixed length that `sequence_sum` divides by."""
    preset = PRESETS["luspo"]
    assert set(preset) == {"loss", "aggregation", "clip_low", "clip_high"}
    responses = draw("gspo", seed=13, spread=0.05)
    clips = {name: preset[name] for name in ("clip_low", "clip_high")}

    def expected(logprobs):
        losses = [references.luspo(new, item.old, item.advantages, **clips) for new, item in zip(logprobs, responses)]
        return np.mean(losses) / cases.MAX_RESPONSE_LENGTH

    value, statistics, gradient, _ = cases.run(responses, preset["loss"], mode=preset["aggregation"], options=clips)
    assert statistics["clipped_low"] + statistics["clipped_high"] > 0
    assert value == pytest.approx(expected([item.logprobs for item in responses]), rel=1e-5)
    cases.assert_close(gradient, cases.central_differences(expected, [item.logprobs for item in responses]))


def test_the_first_update_of_most_losses_is_the_policy_gradient():
    """At ratio 1 they all have the gradient -A / T; GSPO has that of the response's mean."""
    responses = draw("gspo", seed=9)
    total = sum(map(len, responses))
    expected = [-item.advantages / total for item in responses]
    for loss in ("ppo_clip", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce"):
        on_policy = RUNS_SLOW_TESTS or loss in ON_POLICY
        for item in responses:
            item.old[:] = np.nan if on_policy else item.logprobs
        gradient = cases.run(responses, loss, on_policy=on_policy, options=OPTIONS[loss])[2]
        cases.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("clip_low", "clip_high"),
    [pytest.param(0.0, 0.28, marks=SLOW), pytest.param(0.2, 0.0, marks=SLOW), (0.0, 0.0)],
)
def test_a_clip_of_width_zero_leaves_the_first_update_whole(clip_low, clip_high):
    responses = draw("ppo_clip", seed=10)
    options = {"clip_low": clip_low, "clip_high": clip_high}
    gradient = cases.run(responses, "ppo_clip", on_policy=True, options=options)[2]
    cases.assert_close(gradient, [-item.advantages / sum(map(len, responses)) for item in responses])


@pytest.mark.parametrize("loss", OPTIONS)
def test_a_ratio_too_large_for_float32_leaves_everything_finite(loss):
    """exp(100) is infinite in float32. Where the clip bites, the token has the value of the bound and no slope."""
    responses = draw(loss, seed=11)
    for item in responses:
        item.advantages[:] = 1.0
    responses[1].old[2] -= 100
    responses[3].old[0] += 100
    value, _, gradient, _ = cases.run(responses, loss, options=OPTIONS[loss])
    assert np.isfinite(value) and all(np.isfinite(part).all() for part in gradient)
    if loss == "ppo_clip":
        assert gradient[1][2] == 0
        expected = objective(loss, responses, "token_mean")([item.logprobs for item in responses])
        assert value == pytest.approx(expected, rel=1e-5)
