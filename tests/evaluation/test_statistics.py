import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.errors import UserError
from mindrlhf.evaluation import statistics


@given(st.data())
@settings(max_examples=60)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(data):
    num_samples = data.draw(st.integers(1, 8))
    k = data.draw(st.integers(1, num_samples))
    prompts = st.lists(st.booleans(), min_size=num_samples, max_size=num_samples)
    correct = data.draw(st.lists(prompts, min_size=1, max_size=3))
    expected = [np.mean([any(subset) for subset in itertools.combinations(row, k)]) for row in correct]
    np.testing.assert_allclose(statistics.pass_at_k(correct, k), expected, rtol=1e-12, atol=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    correct = np.zeros((3, 20_000), dtype=bool)
    correct[1, :1] = True
    correct[2, :10_000] = True
    values = statistics.pass_at_k(correct, 100)
    expected = 1 - math.comb(10_000, 100) / math.comb(20_000, 100)
    np.testing.assert_allclose(values, [0.0, 100 / 20_000, expected], rtol=1e-10)


@pytest.mark.parametrize(
    ("correct", "k", "message"),
    [
        ([[1, 0]], 3, "k must be between 1 and 2"),
        ([[1, 0]], 0, "k must be between 1 and 2"),
        ([[0.5, 1]], 1, "0 or 1"),
        ([1, 0], 1, "prompts, samples"),
        (np.zeros((0, 4)), 1, "not empty"),
        ([[math.nan, 1]], 1, "1 values that are NaN"),
    ],
)
def test_pass_at_k_refuses_nonsense(correct, k, message):
    with pytest.raises(UserError, match=message):
        statistics.pass_at_k(correct, k)


def test_a_skewed_interval_is_the_textbooks():
    """BCa by Efron and Tibshirani's equations 14.9 to 14.15, from resamples of its own."""
    values = np.random.default_rng(5).random(40) ** 4
    generator, normal = np.random.default_rng(11), NormalDist()
    means = np.sort(generator.choice(values, (40_000, 40)).mean(axis=1))
    bias = normal.inv_cdf(np.mean(means < values.mean()))
    jackknife = np.array([np.delete(values, i).mean() for i in range(40)])
    deviations = jackknife.mean() - jackknife
    acceleration = (deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5)
    interval = statistics.bootstrap_interval(values)
    assert interval.mean == values.mean() and interval == statistics.bootstrap_interval(values)
    for tail, bound in ((0.025, interval.low), (0.975, interval.high)):
        shifted = bias + normal.inv_cdf(tail)
        level = normal.cdf(bias + shifted / (1 - acceleration * shifted))
        # Both are random: a tenth of a standard error.
        assert bound == pytest.approx(np.quantile(means, level), abs=0.1 * values.std() / math.sqrt(40))


def test_degenerate_samples():
    assert statistics.bootstrap_interval([0.3]) == (0.3, -math.inf, math.inf)
    assert statistics.bootstrap_interval([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)
    low, high = statistics.bootstrap_interval([0.0] * 30 + [1.0])[1:3]
    assert 0.0 <= low < 1 / 31 < high < 0.3


def test_the_interval_of_an_accuracy_of_nothing_or_all_is_wilsons():
    def wilson(share, n, z=1.959963984540054):
        """The two roots of the score equation, by the textbook's formula."""
        centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return [(centre + sign * half) / (1 + z * z / n) for sign in (-1, 1)]

    for n in (1, 2, 30, 200):
        for share in (0.0, 1.0):
            found = statistics.accuracy_interval([share] * n)
            assert found.mean == share
            np.testing.assert_allclose(found[1:3], wilson(share, n), rtol=1e-9, atol=1e-12)
    assert f"{statistics.accuracy_interval([0.0] * 200).high:.3f}" == "0.019"
    for values in ([0.5] * 4, [0.0, 1.0, 1.0], [2.0] * 3, [0.3]):
        assert statistics.accuracy_interval(values) == statistics.bootstrap_interval(values)


def test_paired_difference_cancels_what_both_share():
    generator = np.random.default_rng(2)
    difficulty = generator.random(200)
    after, before = difficulty + 0.1 + 0.01 * generator.normal(size=200), difficulty
    difference = statistics.paired_difference(after, before)
    assert 0.09 < difference.low < difference.mean < difference.high < 0.11
    assert difference.mean == pytest.approx(after.mean() - before.mean(), abs=1e-12)
    opposite = statistics.paired_difference(before, after)
    assert opposite.high < 0
    alone = statistics.bootstrap_interval(after)
    assert alone.high - alone.low > 5 * (difference.high - difference.low)
    assert statistics.paired_difference([1, 0, 1], [1, 0, 1]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.bootstrap_interval([]), "not empty"),
        (lambda: statistics.bootstrap_interval([[1.0]]), r"must be \[prompts\]"),
        (lambda: statistics.bootstrap_interval([1.0, math.inf]), "NaN or infinite"),
        (lambda: statistics.paired_difference([1.0, 2.0], [1.0]), "same prompts"),
        (lambda: statistics.pass_at_k([[]], 1), "not empty"),
    ],
)
def test_nonsense_is_a_user_error(call, message):
    with pytest.raises(UserError, match=message):
        call()
