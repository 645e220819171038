"""The geometry of the charts, read from their SVG by an XML parser."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from mindrlhf.observe.charts import BOTTOM, LEFT, MAX_BARS, RIGHT, TOP, draw_chart, interval_plot
from mindrlhf.observe.series import Series


def series_of(values, name="x", first_step=1):
    return Series(name, np.arange(first_step, first_step + len(values)), np.array(values, float))


def elements(svg, css_class):
    return [node for node in ElementTree.fromstring(svg).iter() if css_class in node.get("class", "").split()]


def points(path):
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def test_a_line_spans_the_axes():
    chart = draw_chart("Accuracy", "%", [series_of([0.0, 0.5, 1.0])], from_zero=True)
    (line,) = elements(chart.svg, "line")
    assert points(line.get("d")) == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2), (RIGHT, TOP)]
    ticks = [node.text for node in elements(chart.svg, "tick")]
    assert ticks == ["0%", "20%", "40%", "60%", "80%", "100%", "1", "2", "3", "step"]
    assert (chart.latest, chart.legend, chart.note) == ("100.0%", (), "")


def test_gaps_break_the_line():
    chart = draw_chart("Loss", "", [series_of([1, 2, np.nan, 3, np.nan, 4, 5])])
    (line,) = elements(chart.svg, "line")
    assert [len(points("M" + part)) for part in line.get("d").split("M")[1:]] == [2, 1, 2]
    assert len(elements(chart.svg, "dot")) == 5
    assert chart.hover["series"][0]["values"] == [1, 2, None, 3, None, 4, 5]


def test_an_interval_is_drawn_as_a_band():
    middle = np.array([0.4, 0.6])
    banded = Series("accuracy", np.array([0, 10]), middle, middle - 0.2, middle + 0.2)
    chart = draw_chart("Accuracy", "%", [banded], from_zero=True, noisy=False)
    (band,) = elements(chart.svg, "band")
    corners = points(band.get("d"))
    height = BOTTOM - TOP
    assert corners == [
        (LEFT, pytest.approx(BOTTOM - 0.6 / 0.8 * height)), (RIGHT, TOP),
        (RIGHT, pytest.approx(BOTTOM - 0.4 / 0.8 * height)), (LEFT, pytest.approx(BOTTOM - 0.2 / 0.8 * height)),
    ]  # fmt: skip


def test_a_log_axis_spaces_decades_evenly():
    chart = draw_chart("Difference", "nats", [series_of([1e-6, 1e-5, 1e-4, 0.0])], log=True)
    heights = [y for _, y in points(elements(chart.svg, "line")[0].get("d"))]
    assert heights == [BOTTOM, (TOP + BOTTOM) / 2, TOP]
    assert [node.text for node in elements(chart.svg, "tick")][:3] == ["1e-6", "1e-5", "1e-4"]
    assert chart.hover["series"][0]["values"][-1] == 0.0


def test_five_thousand_steps_stay_small():
    values = np.random.default_rng(0).normal(size=5000)
    chart = draw_chart("Loss", "", [series_of(values)])
    assert len(chart.svg) < 20_000
    assert len(chart.hover["series"][0]["steps"]) <= 500
    raw, line = elements(chart.svg, "raw")[0], elements(chart.svg, "line")[0]
    heights = [np.ptp([y for _, y in points(node.get("d"))]) for node in (raw, line)]
    assert heights[1] < heights[0] / 3, "the thick line is smoothed"


def test_stacked_bars_add_up():
    layers = [series_of([1.0, 2.0], "rollout"), series_of([3.0, 2.0], "update")]
    chart = draw_chart("Time", "s", layers, stacked=True)
    bars = [elements(chart.svg, colour)[0].get("d") for colour in ("c0", "c1")]
    spans = [[(float(a), float(b)) for a, b in re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", bar)] for bar in bars]
    height = BOTTOM - TOP
    at = {seconds: pytest.approx(BOTTOM - seconds / 4 * height, abs=0.06) for seconds in range(5)}
    assert spans == [[(at[0], at[1]), (at[0], at[2])], [(at[1], at[4]), (at[2], at[4])]]
    assert (chart.latest, chart.legend) == ("4 s", ("rollout", "update"))


@pytest.mark.parametrize("num_steps", [1, 59, 61, 149, 300])
def test_bars_of_several_steps_keep_the_sum(num_steps):
    values = np.random.default_rng(num_steps).random(num_steps)
    (bars,) = draw_chart("Time", "s", [series_of(values)], stacked=True).hover["series"]
    size = -(-num_steps // MAX_BARS)  # only the last bar may be of fewer
    sizes = [size] * (num_steps // size) + ([num_steps % size] if num_steps % size else [])
    assert len(bars["values"]) == len(sizes) <= MAX_BARS
    assert np.dot(bars["values"], sizes) == pytest.approx(values.sum(), rel=1e-3)


def test_a_compile_step_is_noted_instead_of_flattening_the_rest():
    chart = draw_chart("Time", "s", [series_of(np.r_[14.2, np.ones(299)])], stacked=True)
    assert chart.note == "1 step above the axis, up to 14.2 s at step 1"
    (bars,) = elements(chart.svg, "bar")
    tops = [float(top) for top in re.findall(r"V([\d.]+)h", bars.get("d"))]
    assert len(tops) == MAX_BARS
    assert tops[0] == TOP and (BOTTOM - tops[1]) / (BOTTOM - TOP) > 0.5


def test_intervals_before_and_after():
    svg = interval_plot([("Before <b>", 0.25, 0.0, 0.5), ("After", 0.75, 0.5, 1.0)])
    assert [node.text for node in elements(svg, "row")] == ["Before <b>", "After"]
    before, after = (re.findall(r"[MH]([\d.]+)", node.get("d")) for node in elements(svg, "interval"))
    assert before[1] == after[0] and float(after[1]) == RIGHT
    assert float(elements(svg, "dot")[0].get("cx")) == pytest.approx((float(before[0]) + float(before[1])) / 2)
