"""MLflow. ``MLFLOW_TRACKING_URI`` names the server; without it a run keeps a database of its own."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from mindrlhf.observe.trackers import TrackedRun

RUN_TAG = "mindrlhf.run_id"
MAX_PARAMS = 100  # in one request
MAX_VALUE = 6000  # characters of a parameter


class Tracker:
    """A run of MLflow; see :class:`mindrlhf.observe.trackers.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        own = f"sqlite:///{(run.directory / 'mlflow.db').resolve()}"
        is_own = not os.environ.get("MLFLOW_TRACKING_URI")
        # The client, not the module's functions: their current run belongs to a thread.
        self._client = MlflowClient(tracking_uri=own if is_own else None)
        artifacts = (run.directory / "mlflow_artifacts").resolve().as_uri() if is_own else None
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            experiment_id = self._client.create_experiment(run.project, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        before = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run.run_id}'")
        if before:
            self._id = before[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment_id, tags={RUN_TAG: run.run_id}, run_name=run.name).info.run_id
            self._write_config(run.config)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        params = [Param(name, value[:MAX_VALUE]) for name, value in _leaves(config)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])
        self._client.log_dict(self._id, dict(config), "config.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics in one request."""
        now_ms = time.time_ns() // 1_000_000
        values = [Metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def write_samples(self, step: int, samples: Sequence[str]) -> None:
        """Keep the samples as text files of the run."""
        for number, sample in enumerate(samples, start=1):
            self._client.log_text(self._id, sample, f"samples/step_{step:08d}_{number}.txt")

    def write_report(self, path: Path) -> None:
        """Keep the report as a file of the run."""
        self._client.log_artifact(self._id, str(path))

    def close(self, *, is_complete: bool) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._id, "FINISHED" if is_complete else "KILLED")


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
