"""Training on fixed data (supervised, preference, reward model) as the life cycle of a run needs it."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mindrlhf.checkpoint.algorithm_state import LearningState
from mindrlhf.config.schema import OfflineConfig
from mindrlhf.config.training import trains_sharded
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.metadata import add_generation
from mindrlhf.errors import RunFailure
from mindrlhf.observe.report import write_report
from mindrlhf.system import heartbeat
from mindrlhf.training import life_cycle
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.checkpoints.shards import export_adapter
from mindrlhf.training.loop.alarms import Events, LossAlarm
from mindrlhf.training.nodes import find_nodes
from mindrlhf.training.preflight import RunInputs
from mindrlhf.training.preflight.output import FINAL_NAME
from mindrlhf.training.replica_team import with_replicas
from mindrlhf.training.runtime import Rank
from mindrlhf.training.team import Team
from mindrlhf.weights.publish.export import sharded_tensors

if TYPE_CHECKING:
    from mindrlhf.training.engine.offline import OfflineWorker


class Trainer(Protocol):
    """The step of a run on fixed data, and the evaluations around it.

    Attributes:
        order: the items of each step.
        num_steps: of the whole run.
    """

    order: EpochSteps
    num_steps: int

    def step(self, index: int, items: np.ndarray) -> dict[str, float]:
        """Make the update of a step, counted from 0, and return its metrics."""

    def evaluate(self, progress: Progress) -> dict[str, float]:
        """Return the metrics of the evaluation that is due after ``progress.step`` steps, empty when none is."""

    def summary(self, progress: Progress) -> str:
        """Return what the user is told at the end; may be empty."""


MakeTrainer = Callable[[OfflineConfig, RunInputs, Team], Trainer]


def run_rank(config: OfflineConfig, inputs: RunInputs, make_trainer: MakeTrainer, *, resume: bool) -> None:
    """Do this rank's part of a run: rank 0 trains and exports the model, the others serve it.

    Args:
        inputs: of the run.
        make_trainer: called on rank 0 while the workers have the model that the run starts from, also when it then
            resumes from a checkpoint.
        resume: continue from the newest whole checkpoint.

    Raises:
        UserError, RunFailure: as what it calls raises them.
    """
    life_cycle.run_rank(config, OfflineTraining(config, inputs, make_trainer), resume=resume)


class OfflineSteps(life_cycle.Steps):
    """The steps of a trainer."""

    def __init__(self, trainer: Trainer, progress: Progress, alarm: LossAlarm | None = None):
        self.progress = progress
        self._trainer = trainer
        self._alarm = alarm

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run."""
        return self._trainer.num_steps

    def step(self) -> dict[str, float]:
        """Train on the items of the next step and return its metrics."""
        index = self.progress.step
        heartbeat.enter(f"step {index + 1}")
        metrics = self._trainer.step(index, self._trainer.order.items(index))
        self.progress.step += 1
        if self._alarm:
            self._alarm.review_losses(self.progress.step, [(metrics["loss"], metrics["grad_norm"])])
        return metrics

    def check(self) -> None:
        """Stop the run if nothing is learned and the config says so."""
        if self._alarm and self._alarm.failure:
            raise RunFailure(self._alarm.failure)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the evaluation that is due, empty when none is."""
        return self._trainer.evaluate(self.progress)


class OfflineTraining(life_cycle.Training):
    """A run on fixed data; see :func:`run_rank`."""

    accuracy = "preference accuracy on held-out pairs"

    def __init__(self, config: OfflineConfig, inputs: RunInputs, make_trainer: MakeTrainer):
        self._config = config
        self._inputs = inputs
        self._make_trainer = make_trainer

    @property
    def shown_steps(self) -> int:
        """Number of steps of the whole run."""
        return self._trainer.num_steps

    def build_worker(self, rank: Rank) -> "OfflineWorker":
        """Return the worker, with the model that the run starts from."""
        from mindrlhf.training.engine.build import build_offline

        return build_offline(self._config, self._inputs.row_lengths, rank)

    def connect(
        self, worker: "OfflineWorker", connections: list, requests: SaveRequests, stack: contextlib.ExitStack
    ) -> None:
        """Connect the ranks and make the trainer."""
        self._ranks = Team(worker, connections)
        self.team = with_replicas(self._config, self._ranks)
        stack.callback(self.team.close)
        self._trainer = self._make_trainer(self._config, self._inputs, self.team)
        self.order = self._trainer.order

    def open(
        self, progress: Progress, checkpoints: RunCheckpoints, first_step: int, stack: contextlib.ExitStack
    ) -> OfflineSteps:
        """Return the steps of the trainer."""
        state = progress.algorithm
        state.learning = state.learning or LearningState()
        events = Events(Path(self._config.run.output_dir), first_step=first_step)
        stack.callback(events.close)
        alarm = LossAlarm(self._config, events, state.learning, self._trainer.num_steps)
        stack.callback(alarm.close)
        return OfflineSteps(self._trainer, progress, alarm)

    def finish(self, worker: "OfflineWorker", progress: Progress) -> None:
        """Print the summary, write the report and export the model."""
        if summary := self._trainer.summary(progress):
            print(f"\n{summary}", flush=True)
        output_dir = Path(self._config.run.output_dir)
        report, final = write_report(output_dir), output_dir / FINAL_NAME
        if self._config.lora.rank is not None and trains_sharded(self._config):
            export_adapter(self.team, final)
        # Last, because it marks the run as complete: one that was killed before can be resumed.
        tensors = None
        if trains_sharded(self._config):
            tensors = sharded_tensors(self.team, self._ranks, find_nodes(self._ranks))
        worker.export(final, self._config.data.tokenizer_dir, tensors)
        add_generation(final, self._config.model.path)
        print(f"model:  {final}\nreport: {report}", flush=True)
