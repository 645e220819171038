"""Weights & Biases. ``WANDB_MODE=offline`` keeps a run on this machine until `wandb sync`; see its documentation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import wandb

from mindrlhf.observe.trackers import TrackedRun


class Tracker:
    """A run of Weights & Biases; see :class:`mindrlhf.observe.trackers.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=run.directory,
            config=dict(run.config),
            settings=wandb.Settings(console="off"),  # the run's own logs have what is printed
        )
        # Its own step may only grow; a run that is resumed writes some steps again.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics, with the step as one of them."""
        self._run.log({"step": step, **metrics})

    def write_samples(self, step: int, samples: Sequence[str]) -> None:
        table = wandb.Table(columns=["sample"], data=[[sample] for sample in samples])
        self._run.log({"step": step, "samples": table})

    def write_report(self, path: Path) -> None:
        self._run.log({"report": wandb.Html(path.read_text(encoding="utf-8"), inject=False)})

    def close(self, *, is_complete: bool) -> None:
        """Send what is left and end the run."""
        self._run.finish(exit_code=0 if is_complete else 1)
