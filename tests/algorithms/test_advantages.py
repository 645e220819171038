"""Group advantages against a float64 reference written from the papers, one group at a time."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mindrlhf.algorithms.advantages import group_normalised

EPSILON = 1e-6
finite = st.floats(-1e3, 1e3, allow_nan=False, width=32)
reward_matrices = arrays.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(2, 9)), elements=finite)


def reference(rewards: np.ndarray, scale: bool) -> np.ndarray:
    """GRPO (arXiv:2402.03300) section 4.1.2, Dr. GRPO (arXiv:2503.20783) section 3.2; exact sums by ``statistics``."""
    result = np.zeros_like(rewards)
    for row, group in enumerate(rewards.tolist()):
        mean = statistics.fmean(group)
        std = statistics.stdev(group)
        if std > 1e-8:
            result[row] = [(reward - mean) / (std + EPSILON if scale else 1.0) for reward in group]
    return result


@settings(max_examples=100, deadline=None)
@given(rewards=reward_matrices, scale=st.booleans())
def test_equals_the_formula(rewards, scale):
    actual = group_normalised(rewards, scale=scale, epsilon=EPSILON)
    # Rewards up to 1e3 leave rounding of 1e-13 in the mean; a spread of 1e-8 and 1e-6 of epsilon amplify it by 1e6.
    np.testing.assert_allclose(actual, reference(rewards, scale), rtol=1e-6, atol=1e-6)


def test_by_hand():
    # Group mean 0.25, deviations 0.75 and three of -0.25; sum of squares 0.75, so std = sqrt(0.75 / 3) = 0.5.
    actual = group_normalised(np.array([[1.0, 0.0, 0.0, 0.0]]), epsilon=0.0)
    np.testing.assert_allclose(actual, [[1.5, -0.5, -0.5, -0.5]], rtol=1e-14)
    centred = group_normalised(np.array([[1.0, 0.0, 0.0, 0.0]]), scale=False)
    np.testing.assert_allclose(centred, [[0.75, -0.25, -0.25, -0.25]], rtol=1e-14)


@settings(max_examples=50, deadline=None)
@given(value=finite, size=st.integers(2, 16), scale=st.booleans())
def test_equal_rewards_give_exactly_zero(value, size, scale):
    rewards = np.array([[value] * size, [0.0] * (size - 1) + [1.0]])
    actual = group_normalised(rewards, scale=scale)
    assert (actual[0] == 0.0).all()
    assert (actual[1] != 0.0).all()


def test_rewards_equal_up_to_rounding_give_exactly_zero():
    rewards = np.array([[0.1 + 0.2, 0.3, 0.3, 0.3]])
    assert rewards.std() > 0
    assert (group_normalised(rewards) == 0.0).all()


@settings(max_examples=50, deadline=None)
@given(rewards=reward_matrices, shift=finite)
def test_a_shift_of_all_rewards_changes_nothing(rewards, shift):
    rounded = np.round(rewards)  # integers, so that the shifted rewards are exact
    expected = group_normalised(rounded)
    np.testing.assert_allclose(group_normalised(rounded + np.round(shift)), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(expected.sum(axis=1), 0.0, atol=1e-9)


def test_integers_are_taken_and_the_input_is_left_alone():
    rewards = np.array([[1, 0], [3, 5]])
    actual = group_normalised(rewards, epsilon=0.0)
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, [[2**-0.5, -(2**-0.5)], [-(2**-0.5), 2**-0.5]])
    np.testing.assert_array_equal(rewards, [[1, 0], [3, 5]])


@pytest.mark.parametrize("rewards", [np.zeros((3, 1)), np.zeros(4), np.zeros((2, 2, 2)), np.zeros((2, 0))])
def test_a_shape_without_groups_is_an_error(rewards):
    with pytest.raises(ValueError, match="group baseline needs"):
        group_normalised(rewards)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_an_error(value):
    with pytest.raises(ValueError, match="not finite"):
        group_normalised(np.array([[0.0, 1.0], [value, 1.0]]))
