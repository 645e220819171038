"""The parts of an algorithm that run on the host: aggregation, overlong responses, selection, KL control."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.algorithms.advantages import groups_with_signal
from mindrlhf.algorithms.aggregation import MODES, token_weights
from mindrlhf.algorithms.kl_control import ESTIMATORS, KlController, kl_estimate
from mindrlhf.algorithms.overlong import complete, soft_punishment

lengths_and_kept = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=12)


@given(responses=lengths_and_kept, mode=st.sampled_from(MODES))
def test_weights_are_the_definition_of_the_aggregation(responses, mode):
    lengths, kept = (np.array(column) for column in zip(*responses))
    weights = token_weights(lengths, kept, mode, max_length=50)
    losses = [np.random.default_rng(index).standard_normal(length) for index, length in enumerate(lengths)]
    total = sum(weight * part.sum() for weight, part in zip(weights, losses)) / lengths.sum()
    chosen = [part for part, keep in zip(losses, kept) if keep]
    if not chosen:
        assert (weights == 0).all()
        return
    expected = {
        "token_mean": np.concatenate(chosen).mean(),
        "sequence_mean": np.mean([part.mean() for part in chosen]),
        "sequence_sum": sum(part.sum() for part in chosen) / (50 * len(chosen)),
    }[mode]
    assert total == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert (weights[~kept] == 0).all()


def test_a_whole_token_mean_has_weights_of_exactly_one():
    weights = token_weights(np.array([3, 7, 11]), np.ones(3, bool), "token_mean", 20)
    np.testing.assert_array_equal(weights, 1.0)


def test_soft_punishment_by_hand():
    # Limit 20, buffer 4: nothing up to 16, -1/4 for each token more, -1 from 20 on.
    lengths = np.array([1, 16, 17, 18, 20, 25])
    np.testing.assert_allclose(soft_punishment(lengths, 20, 4), [0, 0, -0.25, -0.5, -1, -1])
    assert soft_punishment(np.array([20]), 20, 20)[0] == -1.0


@pytest.mark.parametrize("buffer", [0, 21])
def test_a_buffer_that_does_not_fit_is_an_error(buffer):
    with pytest.raises(AssertionError, match=f"buffer of {buffer} tokens"):
        soft_punishment(np.array([3]), 20, buffer)


def test_responses_that_were_cut_are_not_complete():
    assert complete(["stop", "length", "stop"]).tolist() == [True, False, True]


def test_groups_with_signal():
    rewards = np.array([1.0, 0.0, 0.5, 0.5, 0.1 + 0.2, 0.3, 7.0])
    groups, has_signal = groups_with_signal(rewards, np.array([4, 4, 2, 2, 9, 9, 1]))
    assert groups.tolist() == [1, 2, 4, 9]
    assert has_signal.tolist() == [False, False, True, False]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimates_by_their_formulas(estimator):
    stream = np.random.default_rng(3)
    ours, theirs = np.log(stream.random(200)), np.log(stream.random(200))
    ratio = np.exp(theirs) / np.exp(ours)
    expected = {
        "k1": -np.log(ratio),
        "k2": np.log(ratio) ** 2 / 2,
        "k3": ratio - 1 - np.log(ratio),
        "abs": np.abs(np.log(ratio)),
    }[estimator]
    np.testing.assert_allclose(kl_estimate(ours, theirs, estimator), expected, rtol=1e-9, atol=1e-9)


def test_a_fixed_coefficient_stays():
    controller = KlController(0.05)
    controller.update(100.0)
    assert controller.coefficient == 0.05


def test_an_adaptive_coefficient_follows_its_target():
    controller = KlController(1.0, target=0.5)
    controller.update(0.55)  # error 0.1
    assert controller.coefficient == pytest.approx(1.01)
    controller.update(5.0)  # error 9, bounded to 0.2
    assert controller.coefficient == pytest.approx(1.01 * 1.02)
    controller.update(-5.0)
    assert controller.coefficient == pytest.approx(1.01 * 1.02 * 0.98)


def test_a_controller_continues_from_its_state():
    first, second = (KlController(0.1, target=0.5) for _ in range(2))
    first.update(2.0)
    second.restore(json.loads(json.dumps(first.state())))
    for controller in (first, second):
        controller.update(0.4)
    assert first.coefficient == second.coefficient
