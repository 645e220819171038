"""The table of panels: which charts a report has, from the metrics of one run or of several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindrlhf.observe.axes import with_unit
from mindrlhf.observe.charts import NUM_COLOURS, Chart, draw_chart
from mindrlhf.observe.run_data import RunData
from mindrlhf.observe.series import Series

REWARD_SHARE = "timing/reward_share"
# The stages of a step in the order in which they happen; stages not named here follow by name.
STAGES = ("data", "rollout", "reward_wait", "pack", "distribute", "old_log_p", "reference_model", "update")
MIN_FLAT_STEPS = 5

# A line of a chart: runs that differ in their seeds alone, under one name.
Group = tuple[str, Sequence[RunData]]


@dataclass(frozen=True)
class Panel:
    title: str
    charts: list[Chart]


@dataclass(frozen=True, eq=False)
class Spec:
    """A chart of those of its ``metrics`` (name -> legend) that a run has."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    from_zero: bool = True
    log: bool = False
    noisy: bool = True
    band: tuple[str, ...] = ()  # metrics of its lower and upper bound, drawn of one run
    stacked: Callable[[RunData], list[Series]] | None = None  # of one run: bars instead of a line
    several: Callable[[RunData], list[Series]] | None = None  # of one run: lines that its metrics do not name
    overlaid: str = ""  # title of the chart of several runs, where it differs
    latest: Callable[[np.ndarray], float] | None = None  # of finite values: the number beside the title
    folds: bool = True  # when each of its metrics is constant

    def draw(self, series: Sequence[Series], title: str = "", *, stacked: bool = False) -> Chart:
        """Draw the series, at least one."""
        options = {"from_zero": self.from_zero, "log": self.log, "noisy": self.noisy, "stacked": stacked}
        return draw_chart(title or self.title, self.unit, series, **options)


def recent_mean(values: np.ndarray) -> float:
    """Return the mean of the last tenth of finite values (float64 [n], n > 0), which a single step's noise hides."""
    return float(values[-max(1, values.size // 10) :].mean())


def _by_verifier(run: RunData) -> list[Series]:
    prefix, suffix = "reward/", "/mean"
    lines = [
        replace(series, name=name[len(prefix) : -len(suffix)])
        for name, series in run.series.items()
        if name.startswith(prefix) and name.endswith(suffix) and name != "reward/mean"
    ]
    whole = run.series.get("reward/mean")
    is_all = len(lines) == 1 and whole and np.array_equal(lines[0].values, whole.values, equal_nan=True)
    return [] if is_all else lines[:NUM_COLOURS]


def _stages(run: RunData) -> list[Series]:
    """Return the seconds of the largest stages of each step; the rest of the step is "other"."""
    whole = run.series.get("timing/all")
    if whole is None:
        return []
    inside = np.isfinite(whole.values)
    steps, whole_s = whole.steps[inside], whole.values[inside]

    def at_steps(series: Series) -> np.ndarray:
        values = dict(zip(series.steps.tolist(), np.nan_to_num(series.values).tolist()))
        return np.array([values.get(step, 0.0) for step in steps.tolist()])

    stages = {
        name.removeprefix("timing/"): at_steps(series)
        for name, series in run.series.items()
        if name.startswith("timing/") and name not in ("timing/all", REWARD_SHARE)
    }
    if REWARD_SHARE in run.series and "rollout" in stages:  # which it is part of
        waited_s = at_steps(run.series[REWARD_SHARE]) * whole_s
        stages |= {"rollout": stages["rollout"] - waited_s, "reward_wait": waited_s}
    largest = sorted(stages, key=lambda name: -stages[name].sum())[: NUM_COLOURS - 1]
    largest.sort(key=lambda name: (STAGES.index(name) if name in STAGES else len(STAGES), name))
    layers = {name: stages[name] for name in largest}
    layers["other"] = np.maximum(whole_s - sum(layers.values()), 0.0)
    return [Series(name, steps, values) for name, values in layers.items()]


ACCURACY = Spec(
    "Held-out accuracy",
    "%",
    {"eval/accuracy": "accuracy"},
    noisy=False,
    band=("eval/accuracy_low", "eval/accuracy_high"),
    folds=False,
)
REWARD = Spec("Mean reward", "", {"reward/mean": "reward"}, from_zero=False, latest=recent_mean, folds=False)
LOSS = Spec("Loss", "", {"loss": "loss"}, from_zero=False)
_LENGTH = Spec(
    "Response length with range",
    "tokens",
    {"response_length/mean": "mean"},
    band=("response_length/min", "response_length/max"),
    overlaid="Response length",
    latest=recent_mean,
    folds=False,
)
_TIME = Spec(
    "Time per step by stage",
    "s",
    {"timing/all": "step"},
    stacked=_stages,
    overlaid="Time per step",
    latest=lambda values: float(np.median(values)),
    folds=False,
)
_DIFFERENCES = {
    "rollout_diff/max_abs": "largest difference",
    "rollout_diff/mean_abs": "mean difference",
    "rollout_diff/k3": "KL (k3)",
}
_CLIPPED = {"clip_fraction/low": "ratio too low", "clip_fraction/high": "ratio too high"}
_THROUGHPUT = {"vllm_tps": "rollout", "update_tps": "update", "e2e_tps": "whole step"}
PANELS = {
    "Learning": (
        ACCURACY,
        REWARD,
        Spec("Mean reward by verifier", "", {}, from_zero=False, several=_by_verifier, folds=False),
        _LENGTH,
        Spec("Zero-advantage groups", "%", {"reward/groups_without_signal": "groups"}),
        Spec("Truncated responses", "%", {"response_length/cut_fraction": "responses"}),
    ),
    "Policy and optimiser": (
        Spec("Entropy", "nats", {"entropy": "entropy"}),
        Spec("KL to the reference model", "nats", {"kl": "KL"}),
        Spec("Rollout against training log-probs", "nats", _DIFFERENCES, from_zero=False, log=True),
        Spec("Gradient norm", "", {"grad_norm": "gradient norm"}),
        Spec("Clipped tokens", "%", _CLIPPED),
        LOSS,
        Spec("Learning rate", "", {"lr": "learning rate"}, noisy=False),
    ),
    "Speed and memory": (
        _TIME,
        Spec("Throughput per device", "tokens/s", _THROUGHPUT),
        Spec("Packing efficiency", "%", {"packing/efficiency": "packing efficiency"}),
        Spec("Peak memory", "GB", {"memory/peak_rss_gb": "peak memory"}, noisy=False),
    ),
}


def build_panels(groups: Sequence[Group]) -> list[Panel]:
    """Return the panels of one run, or of several over each other; without empty charts, the flat ones last."""
    panels = []
    for title, specs in PANELS.items():
        charts = [chart for spec in specs if (chart := _chart(spec, groups))]
        panels.append(Panel(title, sorted(charts, key=lambda chart: chart.is_flat)))
    return [panel for panel in panels if panel.charts]


def _chart(spec: Spec, groups: Sequence[Group]) -> Chart | None:
    runs = [run for _, members in groups for run in members]
    lines = lines_of(spec, groups)
    own_lines = (spec.stacked or spec.several) if len(runs) == 1 else None
    series = own_lines(runs[0]) if own_lines else lines
    if not series:
        return None
    is_stacked = own_lines is not None and spec.stacked is not None
    chart = spec.draw(series, spec.overlaid if len(runs) > 1 else "", stacked=is_stacked)
    if spec.latest and len(lines) == 1:
        values = lines[0].values
        chart = replace(chart, latest=with_unit(spec.latest(values[np.isfinite(values)]), spec.unit))
    are_same = len(runs) == 1 or len({float(line.values[0]) for line in series}) == 1
    return replace(chart, is_flat=spec.folds and are_same and all(map(_is_flat, series)))


def lines_of(spec: Spec, groups: Sequence[Group]) -> list[Series]:
    """Return the series of a chart: of each metric and each group, at most as many as there are colours."""
    lines = []
    for metric, legend in spec.metrics.items():
        for group, runs in groups:
            if series := [run.series[metric] for run in runs if metric in run.series]:
                name = f"{group} {legend}" if group and len(spec.metrics) > 1 else group or legend
                bounds = [runs[0].series.get(bound) for bound in spec.band] if len(groups) == 1 else []
                lines.append(_mean_of(name, series) if len(series) > 1 else _banded(name, series[0], bounds))
    return lines[:NUM_COLOURS]


def _banded(name: str, series: Series, bounds: Sequence[Series | None]) -> Series:
    """Return a metric with the band between two others, or without it when they are not there at the same steps."""
    if not bounds or any(bound is None or not np.array_equal(bound.steps, series.steps) for bound in bounds):
        return replace(series, name=name)
    return Series(name, series.steps, series.values, *(bound.values for bound in bounds))


def _mean_of(name: str, series: Sequence[Series]) -> Series:
    """Return the mean of several runs at the steps that all have, between their lowest and highest values."""
    steps = series[0].steps
    for line in series[1:]:
        steps = np.intersect1d(steps, line.steps)
    if not steps.size:
        return replace(series[0], name=name)
    values = np.stack([line.values[np.searchsorted(line.steps, steps)] for line in series])
    return Series(name, steps, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _is_flat(series: Series) -> bool:
    return series.values.size >= MIN_FLAT_STEPS and np.ptp(np.nan_to_num(series.values, nan=np.inf)) == 0
