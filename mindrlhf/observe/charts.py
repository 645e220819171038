"""Charts as inline SVG. Colours are classes (``c0`` to ``c7``): the page's style gives them light and dark values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from mindrlhf.observe.axes import Scale, decade_ticks, round_domain, round_ticks, tick_label, with_unit
from mindrlhf.observe.series import Series, robust_ceiling, smooth, thin

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


def draw_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    from_zero: bool = False,
    log: bool = False,
    noisy: bool = True,
    stacked: bool = False,
) -> Chart:
    """Draw one line per series, each with its band if it has one, or stacked bars.

    Args:
        unit: "%" (values are fractions), or a unit that is written as it is.
        series: at least one, each with at least one finite value.
        from_zero: begin the axis at 0; rare extreme points may lie above it.
        log: a logarithmic axis; values of zero and below become gaps.
        noisy: draw long series as a thin raw line under a smoothed one.
        stacked: bars of ``series``, which have the same steps and no gaps; beyond 60 steps a bar is a mean of several.
    """
    if stacked:
        return _stacked_chart(title, unit, series)
    hover_series = [thin(line, MAX_POINTS) for line in series]
    if log:
        series = [Series(line.name, line.steps, np.where(line.values > 0, line.values, np.nan)) for line in series]
    steps, values = (np.concatenate([getattr(line, name) for line in series]) for name in ("steps", "values"))
    first, last = int(steps.min()), int(steps.max())
    margin = 0 if last > first else 0.5
    x, y = Scale(first - margin, last + margin, LEFT, RIGHT), _value_scale(series, unit, from_zero, log)
    lines = (_line(line, x, y, f"c{index % NUM_COLOURS}", noisy) for index, line in enumerate(series))
    finite = series[0].values[np.isfinite(series[0].values)]
    latest = with_unit(float(finite[-1]) if finite.size else math.nan, unit) if len(series) == 1 else ""
    legend = tuple(line.name for line in series) if len(series) > 1 else ()
    note = _note_above(steps, values, y.high, unit) if from_zero else ""
    return Chart(title, unit, _axes(x, y, unit) + "".join(lines), legend, latest, note, _hover(x, unit, hover_series))


def _stacked_chart(title: str, unit: str, series: Sequence[Series]) -> Chart:
    steps, columns = series[0].steps, np.stack([layer.values for layer in series])  # [layers, steps]
    size = math.ceil(len(steps) / MAX_BARS)
    buckets = np.split(np.arange(len(steps)), range(size, len(steps), size))
    means = np.stack([columns[:, bucket].mean(axis=1) for bucket in buckets], axis=1)  # [layers, bars]
    first, last = (np.array([steps[bucket[end]] for bucket in buckets]) for end in (0, -1))
    tops = np.cumsum(means, axis=0)
    x = Scale(first[0] - 0.5, last[-1] + 0.5, LEFT, RIGHT)
    y = Scale(*round_domain(0.0, robust_ceiling(tops[-1]) or 1.0), BOTTOM, TOP)
    body = [_axes(x, y, unit)]
    for layer, (heights, ends) in enumerate(zip(means, tops)):
        bars = []
        for bar, (height, top) in enumerate(zip(heights, ends)):
            left, right = x(first[bar] - 0.5), x(last[bar] + 0.5)
            width = min(MAX_BAR_PX, (right - left) * 0.86)
            bottom_px, top_px = y(top - height), y(top)
            if bottom_px - top_px > 0.01:
                start = (left + right) / 2 - width / 2
                bars.append(f"M{start:.1f} {bottom_px:.1f}V{top_px:.1f}h{width:.1f}V{bottom_px:.1f}z")
        body.append(f'<path class="bar c{layer % NUM_COLOURS}" d="{"".join(bars)}"/>')
    hover = [Series(layer.name, (first + last) // 2, values) for layer, values in zip(series, means)]
    totals = columns.sum(axis=0)
    latest = with_unit(float(np.median(totals)), unit)
    names = tuple(layer.name for layer in series)
    note = _note_above(steps, totals, y.high, unit)
    return Chart(title, unit, "".join(body), names, latest, note, _hover(x, unit, hover))


def interval_plot(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Return an SVG of named points with their intervals, as (name, value, low, high) fractions of one."""
    bottom = 22 + 30 * len(rows)
    x = Scale(0.0, 1.0, 64, RIGHT)
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path class="grid" d="M{x(tick):.1f} 8V{bottom - 12}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x(tick):.1f}" y="{bottom + 4}">{tick:.0%}</text>')
    for index, (name, value, low, high) in enumerate(rows):
        middle, colour = 24 + 30 * index, f"c{index % NUM_COLOURS}"
        parts.append(f'<text class="row" x="0" y="{middle + 4}">{escape(name)}</text>')
        parts.append(f'<path class="interval {colour}" d="M{x(low):.1f} {middle}H{x(high):.1f}"/>')
        parts.append(f'<circle class="dot {colour}" cx="{x(value):.1f}" cy="{middle}" r="5"/>')
    return _svg("".join(parts), "Accuracy before and after training, with intervals", bottom + 12)


def _svg(drawing: str, label: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{drawing}</svg>'


def _value_scale(series: Sequence[Series], unit: str, from_zero: bool, log: bool) -> Scale:
    parts = [part for line in series for part in (line.values, line.low, line.high) if part is not None]
    values = np.concatenate(parts)
    values = values[np.isfinite(values)]
    if not values.size:
        return Scale(0.0, 1.0, BOTTOM, TOP)
    least, most = float(values.min()), float(values.max())
    if log:
        low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
        return Scale(10.0**low, 10.0 ** max(high, low + 1), BOTTOM, TOP, log=True)
    low, high = round_domain(min(0.0, least), robust_ceiling(values) or 1.0) if from_zero else round_domain(least, most)
    if unit == "%" and most <= 1.0:
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
    whole = {round(tick) for tick in round_ticks(x.low, x.high, 7) if abs(tick - round(tick)) < 1e-6}
    x_ticks = sorted(whole) or [round((x.low + x.high) / 2)]
    spacing = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 1.0
    for tick in x_ticks:
        parts.append(f'<path class="axis" d="M{x(tick):.1f} {BOTTOM}v4"/>')
        label = tick_label(tick, spacing, "", largest=x_ticks[-1])
        parts.append(f'<text class="tick" text-anchor="middle" x="{x(tick):.1f}" y="{BOTTOM + 17}">{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    parts.append(f'<text class="tick" text-anchor="end" x="{RIGHT}" y="{HEIGHT - 3}">step</text>')
    return "".join(parts)


def _line(series: Series, x: Scale, y: Scale, colour: str, noisy: bool) -> str:
    shown, num_points = thin(series, MAX_POINTS), len(series.steps)
    band = "" if series.low is None or series.high is None else _band(shown, x, y, colour)
    if noisy and num_points > SMOOTH_FROM:
        averaged = smooth(series, num_points // 30 * 2 + 1)
        evenly = np.unique(np.linspace(0, num_points - 1, MAX_POINTS // 2).astype(int))
        raw = f'<path class="raw {colour}" d="{_path(shown, x, y)}"/>'
        return f'{band}{raw}<path class="line {colour}" d="{_path(averaged.take(evenly), x, y)}"/>'
    points = zip(shown.steps.tolist(), shown.values.tolist()) if num_points <= MARKERS_UP_TO else ()
    dots = (
        f'<circle class="dot {colour}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3"/>'
        for step, value in points
        if math.isfinite(value)
    )
    return f'{band}<path class="line {colour}" d="{_path(shown, x, y)}"/>{"".join(dots)}'


def _path(series: Series, x: Scale, y: Scale) -> str:
    """Return path data; a gap breaks the line, and a point between gaps is a dot (round cap of length 0)."""
    commands, pen_down = [], False
    for step, value in zip(series.steps.tolist(), series.values.tolist()):
        if math.isfinite(value):
            commands.append(f"{'L' if pen_down else 'M'}{x(step):.1f} {y(value):.1f}{'' if pen_down else 'h0'}")
        pen_down = math.isfinite(value)
    return "".join(commands)


def _band(series: Series, x: Scale, y: Scale, colour: str) -> str:
    inside = np.isfinite(series.low) & np.isfinite(series.high)
    steps, low, high = (values[inside].tolist() for values in (series.steps, series.low, series.high))
    if len(steps) == 1:
        return f'<path class="interval {colour}" d="M{x(steps[0]):.1f} {y(low[0]):.1f}V{y(high[0]):.1f}"/>'
    upper = [f"{x(step):.1f} {y(value):.1f}" for step, value in zip(steps, high)]
    lower = [f"{x(step):.1f} {y(value):.1f}" for step, value in zip(reversed(steps), reversed(low))]
    return f'<path class="band {colour}" d="M{"L".join(upper + lower)}z"/>' if steps else ""


def _note_above(steps: np.ndarray, values: np.ndarray, top: float, unit: str) -> str:
    above = np.flatnonzero(values > top * (1 + 1e-9))
    if not above.size:
        return ""
    highest = above[np.argmax(values[above])]
    num_steps = np.unique(steps[above]).size
    count = f"{num_steps:,} step{'s' if num_steps > 1 else ''} above the axis"
    return f"{count}, up to {with_unit(float(values[highest]), unit)} at step {steps[highest]:,}"


def _hover(x: Scale, unit: str, series: Sequence[Series]) -> dict:
    points = [
        {
            "name": line.name,
            "steps": line.steps.tolist(),
            "values": [float(f"{value:.4g}") if math.isfinite(value) else None for value in line.values.tolist()],
        }
        for line in series
    ]
    edges = {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "low": x.low, "high": x.high}
    return {**edges, "unit": unit, "series": points}
