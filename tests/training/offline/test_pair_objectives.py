"""Preference losses: values against the papers' formulas, derivatives against central differences."""

import math

import numpy as np
import pytest

from mindrlhf.config.offline import DpoSection, RewardModelSection
from mindrlhf.training.offline.pair_objectives import DpoObjective, RewardModelObjective

LENGTHS = (3, 5, 1, 4, 7, 2)  # chosen, rejected, chosen, ...


def random_outputs(seed=0):
    generator = np.random.default_rng(seed)
    return [-generator.exponential(size=length) for length in LENGTHS]


def dpo_by_hand(outputs, reference, options):
    """Mean loss of the pairs, from the papers, one pair at a time."""
    terms = []
    num_chosen = sum(LENGTHS[::2])
    for pair in range(len(outputs) // 2):
        chosen, rejected = outputs[2 * pair], outputs[2 * pair + 1]
        log_p = [math.fsum(chosen), math.fsum(rejected)]
        if options.loss == "ipo":
            log_p = [log_p[0] / len(chosen), log_p[1] / len(rejected)]
        h = (log_p[0] - reference[2 * pair]) - (log_p[1] - reference[2 * pair + 1])
        if options.loss == "sigmoid":
            right = 1 / (1 + math.exp(-options.beta * h))
            terms.append(
                -(1 - options.label_smoothing) * math.log(right) - options.label_smoothing * math.log(1 - right)
            )
        elif options.loss == "hinge":
            terms.append(max(0.0, 1 - options.beta * h))
        else:
            terms.append((h - 1 / (2 * options.beta)) ** 2)
    likelihood = -math.fsum(math.fsum(output) for output in outputs[::2]) / num_chosen
    return math.fsum(terms) / len(terms) + options.sft_weight * likelihood


def check_derivatives(evaluate, outputs):
    """Each coefficient is the slope of the mean loss along one output."""
    coefficients = evaluate(outputs).coefficients
    step = 1e-5
    for response, values in enumerate(coefficients):
        for position in range(len(values)):
            losses = []
            for sign in (1, -1):
                moved = [output.copy() for output in outputs]
                moved[response][position] += sign * step
                losses.append(evaluate(moved).losses.mean())
            assert values[position] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        DpoSection(beta=0.3),
        DpoSection(beta=0.3, label_smoothing=0.2, sft_weight=0.5),
        DpoSection(loss="hinge", beta=0.3),
        DpoSection(loss="ipo", beta=0.2),
        DpoSection(loss="ipo", beta=0.2, sft_weight=1.0),
    ],
    ids=lambda options: f"{options.loss}-{options.label_smoothing:g}-{options.sft_weight:g}",
)
def test_dpo(options):
    objective, outputs = DpoObjective(options), random_outputs()
    reference = objective.summarise(random_outputs(1))
    result = objective.evaluate(outputs, reference)
    assert result.losses.mean() == pytest.approx(dpo_by_hand(outputs, reference, options), rel=1e-12)
    check_derivatives(lambda moved: objective.evaluate(moved, reference), outputs)


def test_dpo_at_the_reference():
    """h = 0: every loss is log 2, the gradient pushes the two responses apart by beta / 2 per pair."""
    objective, outputs = DpoObjective(DpoSection(beta=0.1)), random_outputs()
    result = objective.evaluate(outputs, objective.summarise(outputs))
    np.testing.assert_allclose(result.losses, np.log(2))
    for index, values in enumerate(result.coefficients):
        np.testing.assert_allclose(values, (-1 if index % 2 == 0 else 1) * 0.1 * 0.5 / 3)
    assert result.metrics()["accuracy"] == 0.5  # ties


@pytest.mark.parametrize("options", [RewardModelSection(centering=0.0), RewardModelSection(0.01)])
def test_reward_model(options):
    objective, outputs = RewardModelObjective(options), random_outputs()
    scores = [output[-1] for output in outputs]
    expected = []
    for chosen, rejected in zip(scores[::2], scores[1::2]):
        right = 1 / (1 + math.exp(rejected - chosen))
        expected.append(-math.log(right) + options.centering * (chosen + rejected) ** 2)
    result = objective.evaluate(outputs)
    np.testing.assert_allclose(result.losses, expected, rtol=1e-12)
    check_derivatives(objective.evaluate, outputs)
    assert result.metrics()["accuracy"] == np.mean(
        [chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2])]
    )


def test_extreme_margins_stay_finite():
    outputs = [np.array([-1e4]), np.array([-1e-4])] * 3
    for loss in ("sigmoid", "hinge", "ipo"):
        result = DpoObjective(DpoSection(loss=loss, beta=1.0)).evaluate(outputs, np.zeros(6))
        assert np.isfinite(result.losses).all() and np.isfinite(np.concatenate(result.coefficients)).all()
