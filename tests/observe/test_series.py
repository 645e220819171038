"""Downsampling, smoothing and axes, against values worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.observe.axes import Scale, compact, decade_ticks, round_domain, round_ticks, tick_label, with_unit
from mindrlhf.observe.series import Series, robust_ceiling, smooth, thin


def series_of(values):
    return Series("x", np.arange(1, len(values) + 1), np.array(values, float))


def test_thin_keeps_every_extreme():
    values = np.sin(np.arange(5000) / 50)
    values[1234], values[4321] = 9.0, -9.0
    thinned = thin(series_of(values), 400)
    assert len(thinned.steps) <= 400
    assert thinned.values[thinned.steps == 1235] == [9.0]
    assert thinned.values[thinned.steps == 4322] == [-9.0]
    assert (np.diff(thinned.steps) > 0).all()
    assert np.array_equal(values[thinned.steps - 1], thinned.values)


def test_thin_leaves_short_series_and_long_gaps():
    short = series_of([1, 2, 3])
    assert thin(short, 3) is short
    gap = np.r_[np.ones(100), np.full(100, np.nan), np.ones(100)]
    assert np.isnan(thin(series_of(gap), 30).values).sum() >= 5


def test_smooth_by_hand():
    # Weights 1, 2, 1; what lies outside or is missing has none.
    smoothed = smooth(series_of([0, 4, 8, np.nan, 6]), 3)
    assert smoothed.values[[0, 1, 2, 4]] == pytest.approx([4 / 3, 4.0, 20 / 3, 6.0])
    assert np.isnan(smoothed.values[3])


def test_ceiling_ignores_a_compile_step_only():
    assert robust_ceiling(np.array([15.0, 1.0, 1.0, 1.0, 1.0])) == 1.25
    assert robust_ceiling(np.array([15.0, 1.0])) == 15.0
    assert robust_ceiling(np.array([2.5, 1.0, 1.0, 1.0, 1.0])) == 2.5
    assert robust_ceiling(np.array([0.0, np.nan])) == 0.0


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low, length):
    high = low + length
    if high <= low or length < 1e-9 * abs(low):
        return
    low, high = round_domain(low, high)
    ticks = round_ticks(low, high, 6)
    assert 2 <= len(ticks) <= 6
    slack = 1e-6 * (high - low)
    assert ticks[0] >= low - slack and ticks[-1] <= high + slack
    spacing = ticks[1] - ticks[0]
    assert round(spacing / 10 ** math.floor(math.log10(spacing) + 1e-6), 3) in (1, 2, 5)


def test_ticks_by_hand():
    assert round_ticks(0, 100, 6) == [0, 20, 40, 60, 80, 100]
    assert round_domain(0.31, 0.77) == pytest.approx((0.3, 0.8))
    assert round_domain(2.0, 2.0)[0] < 2.0 < round_domain(2.0, 2.0)[1]
    assert decade_ticks(1e-9, 1e-3) == pytest.approx([1e-9, 1e-7, 1e-5, 1e-3])


def test_scales_by_hand():
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert Scale(0, 10, 200, 100)(25) == 100
    assert Scale(1e-4, 1, 0, 100, log=True)(1e-3) == pytest.approx(25)


@pytest.mark.parametrize(
    "value, spacing, unit, text",
    [(0.2, 0.2, "%", "20%"), (0.004, 0.001, "%", "0.4%"), (1.5, 0.5, "s", "1.5"), (-0.02, 0.02, "", "−0.02"),
     (-1e-17, 0.1, "", "0.0"), (15000, 5000, "", "15k"), (2e-5, 1e-5, "", "2e-5"), (0.0, 1e-5, "", "0")],
)  # fmt: skip
def test_tick_labels(value, spacing, unit, text):
    assert tick_label(value, spacing, unit) == text


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0, 5000, 10000, 15000], ["0", "5k", "10k", "15k"]),
        ([0, 2000, 4000], ["0", "2,000", "4,000"]),
        ([500000, 1000000, 1500000], ["0.5M", "1.0M", "1.5M"]),
        ([0, 5e-6, 1e-5], ["0", "0.5e-5", "1.0e-5"]),
    ],
)
def test_the_ticks_of_an_axis_have_one_format(ticks, labels):
    spacing = ticks[1] - ticks[0]
    assert [tick_label(tick, spacing, "", largest=max(ticks)) for tick in ticks] == labels


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0"), (0.9123, "0.912"), (72.51, "72.5"), (3190, "3,190"), (12500, "12.5k"), (3.2e6, "3.2M"),
     (4.1e-5, "4.1e-5"), (1e-6, "1e-6"), (-0.5, "-0.5"), (1e14, "1e+14")],
)  # fmt: skip
def test_compact_numbers(value, text):
    assert compact(value) == text


def test_numbers_with_units():
    assert with_unit(0.7316, "%") == "73.2%"
    assert with_unit(1.284, "s") == "1.28 s"
    assert with_unit(0.5, "") == "0.5"
    assert with_unit(math.nan, "s") == "not finite"
