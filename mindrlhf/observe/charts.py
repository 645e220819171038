"""Charts as inline SVG. Colours are classes (``c0`` to ``c7``): the page's style gives them light and dark values."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from mindrlhf.observe.axes import Scale, decade_ticks, round_domain, round_ticks, tick_label, with_unit
from mindrlhf.observe.series import Series, bucket_means, robust_ceiling, smooth, thin

WIDTH, HEIGHT = 440, 210
LEFT, RIGHT, TOP, BOTTOM = 50, 428, 10, 178
NUM_COLOURS = 8
MAX_POINTS = 500
MAX_BARS = 60
MAX_BAR_PX = 26
SMOOTH_FROM = 60  # points, from which a smoothed line is drawn over the raw one
MARKERS_UP_TO = 30  # points, up to which each is marked


@dataclass(frozen=True)
class Chart:
    """One chart: its drawing, what hovering shows, and a note on points outside the axis ("" without any)."""

    title: str
    unit: str
    drawing: str  # SVG elements on a canvas of WIDTH x HEIGHT
    legend: tuple[str, ...]
    latest: str
    note: str
    hover: dict = field(repr=False)  # for the page's script: plot edges, steps of the axis, points by series
    is_flat: bool = False  # every value is the same: the page folds it

    @property
    def svg(self) -> str:
        """The drawing as an element of a page."""
        return _svg(self.drawing, self.title)


def line_chart(
    title: str, unit: str, series: Sequence[Series], *, from_zero: bool = False, log: bool = False, noisy: bool = True
) -> Chart:
    """Return a chart of one line per series, each with its band if it has one.

    Args:
        title: what is drawn.
        unit: "%" (values are fractions), or a unit that is written as it is.
        series: at least one, each with at least one finite value.
        from_zero: the axis begins at 0, and rare extreme points may lie above it.
        log: a logarithmic axis; values of zero and below become gaps.
        noisy: draw long series as a thin raw line under a smoothed one.
    """
    hover_series = [thin(one, MAX_POINTS) for one in series]
    if log:
        series = [Series(one.name, one.steps, np.where(one.values > 0, one.values, np.nan)) for one in series]
    x, y = _step_scale(series), _value_scale(series, unit, from_zero, log)
    drawing = _axes(x, y, unit)
    for index, one in enumerate(series):
        drawing += _line(one, x, y, f"c{index % NUM_COLOURS}", noisy)
    latest = with_unit(_last_finite(series[0].values), unit) if len(series) == 1 else ""
    hover = _hover(x, unit, hover_series)
    values = np.concatenate([one.values for one in series])
    steps = np.concatenate([one.steps for one in series])
    legend = tuple(one.name for one in series) if len(series) > 1 else ()
    note = _note_above(steps, values, y.high, unit) if from_zero else ""
    return Chart(title, unit, drawing, legend, latest, note, hover)


def stacked_chart(title: str, unit: str, steps: np.ndarray, layers: dict[str, np.ndarray]) -> Chart:
    """Return bars over ``steps`` (int [n]), stacked from ``layers``: name -> float64 [n] without NaN, values >= 0.

    Beyond 60 steps a bar is the mean over several.
    """
    columns = np.stack(list(layers.values()), axis=1)
    first, last, means = bucket_means(steps, columns, MAX_BARS)
    totals = means.sum(axis=1)
    x = Scale(first[0] - 0.5, last[-1] + 0.5, LEFT, RIGHT)
    y = Scale(*round_domain(0.0, robust_ceiling(totals) or 1.0), BOTTOM, TOP)
    body = [_axes(x, y, unit)]
    tops = np.cumsum(means, axis=1)
    for layer in range(means.shape[1]):
        bars = []
        for bar in range(len(totals)):
            left, right = x(first[bar] - 0.5), x(last[bar] + 0.5)
            width = min(MAX_BAR_PX, (right - left) * 0.86)
            bottom_px, top_px = y(tops[bar, layer] - means[bar, layer]), y(tops[bar, layer])
            if bottom_px - top_px > 0.01:
                middle = (left + right) / 2
                bars.append(f"M{middle - width / 2:.1f} {bottom_px:.1f}V{top_px:.1f}h{width:.1f}V{bottom_px:.1f}z")
        body.append(f'<path class="bar c{layer % NUM_COLOURS}" d="{"".join(bars)}"/>')
    middles = (first + last) // 2
    hover = _hover(x, unit, (Series(name, middles, means[:, index]) for index, name in enumerate(layers)))
    step_totals = columns.sum(axis=1)
    note = _note_above(steps, step_totals, y.high, unit)
    latest = with_unit(float(step_totals[-1]), unit)
    return Chart(title, unit, "".join(body), tuple(layers), latest, note, hover)


def interval_plot(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Return an SVG of named points with their intervals, as (name, value, low, high) fractions of one."""
    bottom = 22 + 30 * len(rows)
    x = Scale(0.0, 1.0, 64, RIGHT)
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path class="grid" d="M{x(tick):.1f} 8V{bottom - 12}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x(tick):.1f}" y="{bottom + 4}">{tick:.0%}</text>')
    for index, (name, value, low, high) in enumerate(rows):
        middle = 24 + 30 * index
        colour = f"c{index % NUM_COLOURS}"
        parts.append(f'<text class="row" x="0" y="{middle + 4}">{escape(name)}</text>')
        parts.append(f'<path class="interval {colour}" d="M{x(low):.1f} {middle}H{x(high):.1f}"/>')
        parts.append(f'<circle class="dot {colour}" cx="{x(value):.1f}" cy="{middle}" r="5"/>')
    return _svg("".join(parts), "Accuracy before and after training, with intervals", bottom + 12)


def _svg(drawing: str, label: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{drawing}</svg>'


def _step_scale(series: Sequence[Series]) -> Scale:
    first, last = min(int(one.steps[0]) for one in series), max(int(one.steps[-1]) for one in series)
    return Scale(first, last, LEFT, RIGHT) if last > first else Scale(first - 0.5, last + 0.5, LEFT, RIGHT)


def _value_scale(series: Sequence[Series], unit: str, from_zero: bool, log: bool) -> Scale:
    bands = [band for one in series for band in (one.values, one.low, one.high) if band is not None]
    values = np.concatenate(bands)
    values = values[np.isfinite(values)]
    if not values.size:
        return Scale(0.0, 1.0, BOTTOM, TOP)
    if log:
        low, high = math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))
        return Scale(10.0**low, 10.0 ** max(high, low + 1), BOTTOM, TOP, log=True)
    if from_zero:
        low, high = round_domain(min(0.0, float(values.min())), robust_ceiling(values) or 1.0)
    else:
        low, high = round_domain(float(values.min()), float(values.max()))
    if unit == "%" and values.max() <= 1.0:
        high = min(high, 1.0)
    return Scale(low, high, BOTTOM, TOP)


def _axes(x: Scale, y: Scale, unit: str) -> str:
    parts = []
    y_ticks = decade_ticks(y.low, y.high) if y.log else round_ticks(y.low, y.high, 6)
    spacing = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else y.high - y.low
    for tick in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{RIGHT}"/>')
        label = tick_label(tick, spacing, unit, y.log, max(map(abs, y_ticks)))
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 7}" y="{y(tick) + 4:.1f}">{label}</text>')
    step_ticks = _step_ticks(x)
    step_spacing = step_ticks[1] - step_ticks[0] if len(step_ticks) > 1 else 1.0
    for tick in step_ticks:
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {BOTTOM}v4"/>')
        label = tick_label(tick, step_spacing, "", largest=step_ticks[-1])
        parts.append(f'<text class="tick" text-anchor="middle" x="{x(tick):.1f}" y="{BOTTOM + 17}">{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    parts.append(f'<text class="tick" text-anchor="end" x="{RIGHT}" y="{HEIGHT - 3}">step</text>')
    return "".join(parts)


def _step_ticks(x: Scale) -> list[int]:
    return sorted({round(tick) for tick in round_ticks(x.low, x.high, 7) if abs(tick - round(tick)) < 1e-6}) or [
        round((x.low + x.high) / 2)
    ]


def _line(series: Series, x: Scale, y: Scale, colour: str, noisy: bool) -> str:
    parts = []
    if series.low is not None and series.high is not None:
        parts.append(_band(thin(series, MAX_POINTS), x, y, colour))
    num_points = len(series.steps)
    if noisy and num_points > SMOOTH_FROM:
        parts.append(f'<path class="raw {colour}" d="{_path(thin(series, MAX_POINTS), x, y)}"/>')
        averaged = smooth(series, num_points // 30 * 2 + 1)
        evenly = np.unique(np.linspace(0, num_points - 1, MAX_POINTS // 2).astype(int))
        parts.append(f'<path class="line {colour}" d="{_path(averaged.take(evenly), x, y)}"/>')
    else:
        shown = thin(series, MAX_POINTS)
        parts.append(f'<path class="line {colour}" d="{_path(shown, x, y)}"/>')
        if num_points <= MARKERS_UP_TO:
            parts.append(_markers(shown, x, y, colour))
    return "".join(parts)


def _path(series: Series, x: Scale, y: Scale) -> str:
    """Return path data; a gap breaks the line, and a point between gaps is a dot (round cap of length 0)."""
    commands, pen_down = [], False
    for step, value in zip(series.steps.tolist(), series.values.tolist()):
        if not math.isfinite(value):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{x(step):.1f} {y(value):.1f}{'' if pen_down else 'h0'}")
        pen_down = True
    return "".join(commands)


def _band(series: Series, x: Scale, y: Scale, colour: str) -> str:
    inside = np.isfinite(series.low) & np.isfinite(series.high)
    steps, low, high = series.steps[inside].tolist(), series.low[inside].tolist(), series.high[inside].tolist()
    if len(steps) == 1:
        return f'<path class="interval {colour}" d="M{x(steps[0]):.1f} {y(low[0]):.1f}V{y(high[0]):.1f}"/>'
    upper = [f"{x(step):.1f} {y(value):.1f}" for step, value in zip(steps, high)]
    lower = [f"{x(step):.1f} {y(value):.1f}" for step, value in zip(reversed(steps), reversed(low))]
    return f'<path class="band {colour}" d="M{"L".join(upper + lower)}z"/>' if steps else ""


def _markers(series: Series, x: Scale, y: Scale, colour: str) -> str:
    points = zip(series.steps.tolist(), series.values.tolist())
    return "".join(
        f'<circle class="dot {colour}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3"/>'
        for step, value in points
        if math.isfinite(value)
    )


def _note_above(steps: np.ndarray, values: np.ndarray, top: float, unit: str) -> str:
    above = np.flatnonzero(values > top * (1 + 1e-9))
    if not above.size:
        return ""
    highest = above[np.argmax(values[above])]
    num_steps = np.unique(steps[above]).size
    count = f"{num_steps:,} step{'s' if num_steps > 1 else ''} above the axis"
    return f"{count}, up to {with_unit(float(values[highest]), unit)} at step {steps[highest]:,}"


def _last_finite(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan


def _hover(x: Scale, unit: str, series: Iterable[Series]) -> dict:
    return {
        "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "low": x.low, "high": x.high, "unit": unit,
        "series": [
            {
                "name": one.name,
                "steps": one.steps.tolist(),
                "values": [float(f"{value:.4g}") if math.isfinite(value) else None for value in one.values.tolist()],
            }
            for one in series
        ],
    }  # fmt: skip
