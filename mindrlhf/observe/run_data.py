"""The files of a run directory, read for its report."""

import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.observe.records import ALARM, ALARM_OVER, GUARDS_NAME, read_jsonl
from mindrlhf.observe.series import Series
from mindrlhf.system.sizes import read_json_object

SAMPLES_PER_STEP = 6
STARTS_NAME = "starts.jsonl"  # when each process of the run began
# The axes of a chart of larger ones would overflow; what a run computes in float32 ends at 3.4e38.
MAX_MAGNITUDE = 1e300
# Raised by values of other types than a run writes.
OTHER_TYPES = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


@dataclass(frozen=True)
class RunData:
    """The files of one run, read and checked."""

    directory: Path
    name: str
    last_written: datetime  # UTC
    series: dict[str, Series]  # by metric name, each with at least one finite value
    num_steps: int  # the last step seen
    first_samples: list[dict[str, Any]]  # of the first step that saved samples
    last_samples: list[dict[str, Any]]  # of the last one, empty when it is the first
    summary: dict[str, Any] | None
    config_text: str | None
    starts_s: list[float]  # seconds since the epoch at which the run was started, and continued
    alarms: list[tuple[str, str]] = field(default_factory=list)  # in which steps, and what was said
    started: dict[str, Any] = field(default_factory=dict)  # "command" and "num_ranks" of the newest start, where noted

    def values(self, metric: str) -> np.ndarray:
        """Return the finite values of a metric, float64 [n], n = 0 when the run does not have it."""
        if metric not in self.series:
            return np.zeros(0)
        values = self.series[metric].values
        return values[np.isfinite(values)]


def read_run(run_dir: Path) -> RunData:
    """Read ``metrics.jsonl`` and, where they exist, ``samples.jsonl``, ``summary.json`` and ``config.yaml``.

    Raises:
        UserError: no such directory, no metrics in it, or a file that is not what it should be.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"no run directory {run_dir}: give the directory that `mindrlhf train` wrote")
    metrics_path = run_dir / "metrics.jsonl"
    series = _read_series(metrics_path) if metrics_path.exists() else {}
    if not series:
        raise UserError(f"no metrics in {metrics_path}: a report needs a run that finished at least one step")
    config_path, summary_path = run_dir / "config.yaml", run_dir / "summary.json"
    samples_path = run_dir / "samples.jsonl"
    starts = _read_starts(run_dir / STARTS_NAME)
    first_samples, last_samples = _read_samples(samples_path) if samples_path.exists() else ([], [])
    return RunData(
        directory=run_dir,
        name=run_dir.resolve().name,
        last_written=datetime.fromtimestamp(metrics_path.stat().st_mtime, timezone.utc),
        series=series,
        num_steps=max(int(one.steps[-1]) for one in series.values()),
        first_samples=first_samples,
        last_samples=last_samples,
        summary=read_json_object(summary_path, "remove it") if summary_path.exists() else None,
        starts_s=[float(one["start_s"]) for one in starts],
        started=starts[-1] if starts else {},
        alarms=_read_alarms(run_dir / GUARDS_NAME),
        config_text=config_path.read_text(encoding="utf-8", errors="replace") if config_path.exists() else None,
    )


def _read_starts(path: Path) -> list[dict[str, Any]]:
    return [one for one in (read_jsonl(path) if path.exists() else ()) if is_number(one.get("start_s"))]


def _read_alarms(path: Path) -> list[tuple[str, str]]:
    """Return when each alarm began and ended, and its text."""
    begun: list[dict[str, Any]] = []
    for event in read_jsonl(path) if path.exists() else ():
        if event.get("event") == ALARM:
            begun.append(event)
        elif event.get("event") == ALARM_OVER:
            for one in begun:
                if one.get("alarm") == event.get("alarm"):
                    one.setdefault("end", event["step"])
    return [
        (f"step {one['step']} to {one['end']}" if "end" in one else f"from step {one['step']} on", str(one.get("text")))
        for one in begun
    ]


def _read_series(path: Path) -> dict[str, Series]:
    """Return the metrics by name; a step may be spread over several records, the last word on a value counts."""
    points: dict[str, dict[int, float]] = {}
    for record in read_jsonl(path):
        for name, value in record.items():
            if name != "step" and (value is None or is_number(value)):
                points.setdefault(name, {})[record["step"]] = math.nan if value is None else float(value)
    series = {}
    for name, value_of_step in points.items():
        steps = sorted(value_of_step)
        values = np.array([value_of_step[step] for step in steps], np.float64)
        if np.isfinite(values).any():
            series[name] = Series(name, np.array(steps, np.int64), values)
    return series


def _read_samples(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the first samples of the first and of the last step, [] for the latter when it is the same."""
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for record in read_jsonl(path):
        if first and record["step"] != first[0]["step"] and (not last or record["step"] != last[0]["step"]):
            last = [record]
        else:
            (last or first).append(record)
    return first[:SAMPLES_PER_STEP], last[:SAMPLES_PER_STEP]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_MAGNITUDE
