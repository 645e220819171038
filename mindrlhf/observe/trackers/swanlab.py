"""SwanLab. ``SWANLAB_MODE=offline`` keeps a run on this machine until `swanlab sync`; see its documentation."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import swanlab

from mindrlhf.observe.trackers import TrackedRun


class Tracker:
    """A run of SwanLab; see :class:`mindrlhf.observe.trackers.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        # The run's own logs have what is printed, and nobody is there to answer questions.
        settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        log_dir = run.directory / "swanlab"
        log_dir.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            log_dir=str(log_dir),
            config=dict(run.config),
            settings=settings,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics that are finite: SwanLab draws no others."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def write_samples(self, step: int, samples: Sequence[str]) -> None:
        self._run.log({"samples": [swanlab.Text(sample) for sample in samples]}, step=step)

    def write_report(self, path: Path) -> None:
        """Keep the report as a file of the run."""
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, *, is_complete: bool) -> None:
        """Send what is left and end the run."""
        self._run.finish(state="success" if is_complete else "aborted")
