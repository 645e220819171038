"""Training on fixed data (supervised, preference, reward model) as :func:`mindrlhf.training.train.train` runs it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindrlhf.checkpoint.algorithm_state import LearningState
from mindrlhf.checkpoint.state import MODEL_NAME
from mindrlhf.config.schema import OfflineConfig
from mindrlhf.config.training import UNPACKED, trains_sharded
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.metadata import add_generation
from mindrlhf.data.mindrecord import Prompt, PromptFile
from mindrlhf.errors import RunFailure
from mindrlhf.observe.report import write_report
from mindrlhf.system import heartbeat
from mindrlhf.training.batch import RowOptions
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.checkpoints.shards import export_adapters
from mindrlhf.training.loop.alarms import Events, LossAlarm
from mindrlhf.training.nodes import find_nodes
from mindrlhf.training.preflight import RunInputs, check_offline_inputs
from mindrlhf.training.preflight.output import FINAL_NAME
from mindrlhf.training.replica_team import with_replicas
from mindrlhf.training.results import UpdateResult
from mindrlhf.training.runtime import Rank, num_ranks_from_environment
from mindrlhf.training.team import Team
from mindrlhf.weights.publish.export import sharded_tensors

if TYPE_CHECKING:
    from mindrlhf.training.engine.offline import OfflineWorker


def read_records(file: PromptFile, block: int = 4096) -> Iterator[Prompt]:
    """Yield every record of a prompt file."""
    for start in range(0, len(file), block):
        yield from file.read(range(start, min(start + block, len(file))))


def read_image_files(file: PromptFile) -> list[tuple[bytes, ...]]:
    """Read the images of every record of a prompt file, as PNG."""
    return [record.image_files for record in read_records(file)]


def row_options(config: OfflineConfig, inputs: RunInputs, num_ranks: int) -> RowOptions:
    """Return how the rows of a run are packed and cut into micro-batches."""
    return RowOptions(
        inputs.row_lengths,
        config.training.micro_batch_size,
        num_ranks,
        config.training.packing != UNPACKED,
        in_step=trains_sharded(config),
        image_tokens=inputs.image_tokens,
    )


def rank_metrics(results: Sequence[UpdateResult], lr: float) -> dict[str, float]:
    """Return the metrics that every update has."""
    return {
        "grad_norm": results[0].grad_norm,
        "lr": lr,
        "recompiles": max(result.process.recompiles for result in results),
        "memory/peak_rss_gb": max(result.process.peak_rss_gb for result in results),
    }


class OfflineTrainer:
    """The steps of a run on fixed data on rank 0.

    Attributes:
        order: the items of each step.
        num_steps: of the whole run.
        progress: where the run is, once it is begun.
        alarm: looks at the losses.
    """

    order: EpochSteps
    num_steps: int
    progress: Progress
    alarm: LossAlarm | None = None

    def update(self, index: int, items: np.ndarray) -> dict[str, float]:
        """Make the update of a step, counted from 0, and return its metrics."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the evaluation that is due after ``progress.step`` steps, empty when none is."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return what the user is told at the end; may be empty."""
        return ""

    def begin(self) -> None:
        """Do nothing before the first step."""

    def step(self) -> dict[str, float]:
        """Train on the items of the next step and return its metrics."""
        index = self.progress.step
        heartbeat.enter(f"step {index + 1}")
        metrics = self.update(index, self.order.items(index))
        self.progress.step += 1
        if self.alarm:
            self.alarm.review_losses(self.progress.step, [(metrics["loss"], metrics["grad_norm"])])
        return metrics

    def details(self) -> None:
        """Return nothing: a step has no more than its metrics."""

    def check(self) -> None:
        """Stop the run if nothing is learned and the config says so."""
        if self.alarm and self.alarm.failure:
            raise RunFailure(self.alarm.failure)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Return a context around the saving of a checkpoint."""
        return contextlib.nullcontext()


class OfflineTask:
    """A run on fixed data.

    Args:
        make_trainer: called on rank 0 while the workers have the model that the run starts from, also when it then
            resumes from a checkpoint.
    """

    accuracy = "preference accuracy on held-out pairs"

    def __init__(self, config: OfflineConfig, make_trainer: Callable[[OfflineConfig, RunInputs, Team], OfflineTrainer]):
        self._config = config
        self._inputs = check_offline_inputs(config, num_ranks_from_environment())
        self._make_trainer = make_trainer

    @property
    def shown_steps(self) -> int:
        """Number of steps of the whole run."""
        return self._trainer.num_steps

    def start_early(self, stack: contextlib.ExitStack) -> None:
        """Start nothing: there is no generator."""

    start_early_elsewhere = start_early

    def servers(self) -> None:
        """Return no servers."""

    def build_worker(self, rank: Rank) -> "OfflineWorker":
        """Return the worker, with the model that the run starts from."""
        from mindrlhf.training.engine.build import build_offline

        return build_offline(self._config, self._inputs.row_lengths, rank)

    def connect(
        self, worker: "OfflineWorker", connections: Sequence[Any], requests: SaveRequests, stack: contextlib.ExitStack
    ) -> None:
        """Connect the ranks and make the trainer."""
        self._ranks = Team(worker, connections)
        self.team = with_replicas(self._config, self._ranks)
        stack.callback(self.team.close)
        self._trainer = self._make_trainer(self._config, self._inputs, self.team)
        self.order = self._trainer.order

    def open(
        self, progress: Progress, checkpoints: RunCheckpoints, first_step: int, stack: contextlib.ExitStack
    ) -> OfflineTrainer:
        """Return the trainer, which goes on from ``progress``."""
        state, trainer = progress.algorithm, self._trainer
        state.learning = state.learning or LearningState()
        events = Events(Path(self._config.run.output_dir), first_step=first_step)
        stack.callback(events.close)
        trainer.progress = progress
        trainer.alarm = LossAlarm(self._config, events, state.learning, trainer.num_steps)
        stack.callback(trainer.alarm.close)
        return trainer

    def finish(self, worker: "OfflineWorker", progress: Progress) -> None:
        """Print the summary, write the report and export the model."""
        if summary := self._trainer.summary():
            print(f"\n{summary}", flush=True)
        output_dir = Path(self._config.run.output_dir)
        report, final = write_report(output_dir), output_dir / FINAL_NAME
        if self._config.lora.rank is not None:
            export_adapters(self.team, {MODEL_NAME: final})
        # Last, because it marks the run as complete: one that was killed before can be resumed.
        tensors = sharded_tensors(self.team, self._ranks, find_nodes(self._ranks))
        worker.export(final, self._config.data.tokenizer_dir, tensors)
        add_generation(final, self._config.model.path)
        print(f"model:  {final}\nreport: {report or 'none, see the warning'}", flush=True)
