"""Which charts a report has, from the metrics that a run has."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindrlhf.observe.axes import with_unit
from mindrlhf.observe.charts import NUM_COLOURS, Chart, line_chart, stacked_chart
from mindrlhf.observe.run_data import RunData
from mindrlhf.observe.series import Series

# The stages of a step in the order in which they happen; stages not named here follow by name.
REWARD_SHARE = "timing/reward_share"
STAGES = ("data", "rollout", "reward_wait", "pack", "distribute", "old_log_p", "reference_model", "update")


@dataclass(frozen=True)
class Panel:
    title: str
    charts: list[Chart]


@dataclass(frozen=True)
class _Lines:
    """A line chart of those of its metrics (name -> legend) that the run has."""

    title: str
    unit: str
    metrics: dict[str, str]
    from_zero: bool = False
    log: bool = False
    noisy: bool = True


OPTIMISATION = (
    _Lines("Entropy", "nats", {"entropy": "entropy"}, from_zero=True),
    _Lines("KL to the reference model", "nats", {"kl": "KL"}, from_zero=True),
    _Lines(
        "Rollout against training log-probs",
        "nats",
        {
            "rollout_diff/max_abs": "largest difference",
            "rollout_diff/mean_abs": "mean difference",
            "rollout_diff/k3": "KL (k3)",
        },
        log=True,
    ),
    _Lines("Gradient norm", "", {"grad_norm": "gradient norm"}, from_zero=True),
    _Lines(
        "Clipped tokens",
        "%",
        {"clip_fraction/low": "ratio too low", "clip_fraction/high": "ratio too high"},
        from_zero=True,
    ),
    _Lines("Loss", "", {"loss": "loss"}),
    _Lines("Learning rate", "", {"lr": "learning rate"}, from_zero=True, noisy=False),
)
SPEED = (
    _Lines(
        "Throughput per device",
        "tokens/s",
        {"vllm_tps": "rollout", "update_tps": "update", "e2e_tps": "whole step"},
        from_zero=True,
    ),
    _Lines("Packing efficiency", "%", {"packing/efficiency": "packing efficiency"}, from_zero=True),
    _Lines("Peak memory", "GB", {"memory/peak_rss_gb": "peak memory"}, from_zero=True, noisy=False),
)
# Beside those of their own that one run has: what is drawn of several runs.
_ACCURACY = _Lines("Held-out accuracy", "%", {"eval/accuracy": "accuracy"}, from_zero=True, noisy=False)
_REWARD = _Lines("Mean reward", "", {"reward/mean": "reward"})
_LENGTH = _Lines("Response length", "tokens", {"response_length/mean": "mean"}, from_zero=True)
_STEP_TIME = _Lines("Time per step", "s", {"timing/all": "step"}, from_zero=True)
LEARNING = (
    _Lines("Zero-advantage groups", "%", {"reward/groups_without_signal": "groups"}, from_zero=True),
    _Lines("Truncated responses", "%", {"response_length/cut_fraction": "responses"}, from_zero=True),
)


MIN_FLAT_STEPS = 5


def recent_mean(values: np.ndarray) -> float:
    """Return the mean of the last tenth of finite values (float64 [n], n > 0), which a single step's noise hides."""
    return float(values[-max(1, values.size // 10) :].mean())


def overlay_panels(runs: Sequence[RunData], names: Sequence[str]) -> list[Panel]:
    """Return the panels of several runs over each other: a line of each in every chart."""
    specs = (
        ("Learning", [_ACCURACY, _REWARD, _LENGTH, *LEARNING]),
        ("Policy and optimiser", OPTIMISATION),
        ("Speed and memory", [_STEP_TIME, *SPEED]),
    )
    panels = [Panel(title, _flat_last(_lines(list(zip(names, runs)), lines))) for title, lines in specs]
    return [panel for panel in panels if panel.charts]


def build_panels(run: RunData) -> list[Panel]:
    """Return the panels of a run; charts and panels without data are left out."""
    learning = [_accuracy(run), _reward(run), _reward_by_verifier(run), _lengths(run), *_lines([("", run)], LEARNING)]
    panels = [
        Panel("Learning", _flat_last(learning)),
        Panel("Policy and optimiser", _flat_last(_lines([("", run)], OPTIMISATION))),
        Panel("Speed and memory", _flat_last([_timings(run), *_lines([("", run)], SPEED)])),
    ]
    return [panel for panel in panels if panel.charts]


def _flat_last(charts: Iterable[Chart | None]) -> list[Chart]:
    return sorted((chart for chart in charts if chart), key=lambda chart: chart.is_flat)


def accuracy_series(run: RunData) -> Series | None:
    """Return held-out accuracy with its intervals."""
    return _banded(run, "accuracy", "eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")


def _accuracy(run: RunData) -> Chart | None:
    series = accuracy_series(run)
    return series and line_chart("Held-out accuracy", "%", [series], from_zero=True, noisy=False)


def _reward(run: RunData) -> Chart | None:
    series = run.series.get("reward/mean")
    return series and _recent(line_chart("Mean reward", "", [_named(series, "reward")]), series)


def _reward_by_verifier(run: RunData) -> Chart | None:
    prefix, suffix = "reward/", "/mean"
    verifiers = [
        _named(series, name[len(prefix) : -len(suffix)])
        for name, series in run.series.items()
        if name.startswith(prefix) and name.endswith(suffix) and name != "reward/mean"
    ]
    whole = run.series.get("reward/mean")
    if len(verifiers) == 1 and whole and np.array_equal(verifiers[0].values, whole.values, equal_nan=True):
        return None  # the only verifier, which the chart of the reward shows
    return line_chart("Mean reward by verifier", "", verifiers[:NUM_COLOURS]) if verifiers else None


def _lengths(run: RunData) -> Chart | None:
    series = _banded(run, "mean", "response_length/mean", "response_length/min", "response_length/max")
    if series is None:
        return None
    return _recent(line_chart("Response length with range", "tokens", [series], from_zero=True), series)


def _recent(chart: Chart, series: Series) -> Chart:
    """Return a chart whose number is that of the facts above: not the last step's, which is noise."""
    return replace(chart, latest=with_unit(recent_mean(series.values[np.isfinite(series.values)]), chart.unit))


def _lines(runs: Sequence[tuple[str, RunData]], specs: Iterable[_Lines]) -> Iterable[Chart]:
    """Yield the charts of those metrics that there are; lines of several runs bear their names."""
    for spec in specs:
        series = [
            _named(run.series[metric], f"{name} {legend}".strip() if len(spec.metrics) > 1 or not name else name)
            for metric, legend in spec.metrics.items()
            for name, run in runs
            if metric in run.series
        ][:NUM_COLOURS]
        if series:
            chart = line_chart(spec.title, spec.unit, series, from_zero=spec.from_zero, log=spec.log, noisy=spec.noisy)
            are_same = len({float(one.values[0]) for one in series}) == 1 or len(runs) == 1
            yield replace(chart, is_flat=are_same and all(map(_is_flat, series)))


def _is_flat(series: Series) -> bool:
    return series.values.size >= MIN_FLAT_STEPS and np.ptp(np.nan_to_num(series.values, nan=np.inf)) == 0


def _timings(run: RunData) -> Chart | None:
    """Return the time of the largest stages, stacked; the rest of the step is "other"."""
    if "timing/all" not in run.series:
        return None
    whole = run.series["timing/all"]
    inside = np.isfinite(whole.values)
    steps, whole_s = whole.steps[inside], whole.values[inside]
    stages = {
        name.removeprefix("timing/"): _at_steps(series, steps)
        for name, series in run.series.items()
        if name.startswith("timing/") and name not in ("timing/all", REWARD_SHARE)
    }
    if REWARD_SHARE in run.series and "rollout" in stages:  # which it is part of
        waited_s = _at_steps(run.series[REWARD_SHARE], steps) * whole_s
        stages |= {"rollout": stages["rollout"] - waited_s, "reward_wait": waited_s}
    largest = sorted(stages, key=lambda name: -stages[name].sum())[: NUM_COLOURS - 1]
    largest.sort(key=lambda name: (STAGES.index(name) if name in STAGES else len(STAGES), name))
    layers = {name: stages[name] for name in largest}
    layers["other"] = np.maximum(whole_s - sum(layers.values()), 0.0)
    chart = stacked_chart("Time per step by stage", "s", steps, layers)
    return replace(chart, latest=with_unit(float(np.median(whole_s)), "s"))


def _at_steps(series: Series, steps: np.ndarray) -> np.ndarray:
    """Return the values at ``steps`` (int [n]), 0 where the series has none."""
    value_of_step = dict(zip(series.steps.tolist(), np.nan_to_num(series.values).tolist()))
    return np.array([value_of_step.get(step, 0.0) for step in steps.tolist()])


def _banded(run: RunData, name: str, metric: str, low: str, high: str) -> Series | None:
    """Return a metric with the band between two others, or without it when they are not there at the same steps."""
    if metric not in run.series:
        return None
    middle, bands = run.series[metric], [run.series.get(low), run.series.get(high)]
    if all(band is not None and np.array_equal(band.steps, middle.steps) for band in bands):
        return Series(name, middle.steps, middle.values, *(band.values for band in bands))
    return _named(middle, name)


def _named(series: Series, name: str) -> Series:
    return Series(name, series.steps, series.values, series.low, series.high)
