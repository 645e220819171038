"""A run on fixed data (supervised, preference, reward model) as the lead rank drives it: steps, files, checkpoints."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindrlhf.config.parse import write_config
from mindrlhf.config.schema import DpoConfig, RewardModelConfig, SftConfig
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.observe.sinks import SinkGroup, open_sinks
from mindrlhf.system import heartbeat
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints, check_output
from mindrlhf.training.preflight import FINAL_NAME
from mindrlhf.training.runtime import Rank, is_lead_process, start_runtime
from mindrlhf.training.team import Team, connect, serve
from mindrlhf.training.worker.learner import Learner

Config = SftConfig | DpoConfig | RewardModelConfig


class Trainer(Protocol):
    """What a step does, and what is evaluated around it.

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


def run_rank(
    config: Config,
    build_learner: Callable[[Rank], Learner],
    make_trainer: Callable[[Team], Trainer],
    *,
    resume: bool,
) -> None:
    """Do this rank's part of a run: the lead trains and exports the model, the others serve it.

    Args:
        build_learner: builds the worker of this rank, with the model that the run starts from.
        make_trainer: called on the lead while the learner has that model, also when it then resumes from a checkpoint.
        resume: continue from the newest whole checkpoint.

    Raises:
        UserError, RunFailure: as the rooms raise them.
    """
    if is_lead_process():
        check_output(config, resume=resume)
    rank = start_runtime(config.run, Path(config.run.output_dir) / "logs")
    connections = connect(rank)
    learner = build_learner(rank)
    if rank.is_lead:
        _lead(config, learner, connections, make_trainer, resume)
    else:
        serve(learner, connections[0])


def _lead(
    config: Config, learner: Learner, connections: list, make_trainer: Callable[[Team], Trainer], resume: bool
) -> None:
    """Train to the last step, or until a signal asks to end, and export the model."""
    output_dir = Path(config.run.output_dir)
    with contextlib.ExitStack() as stack:
        team = Team(learner, connections)
        stack.callback(team.close)
        trainer = make_trainer(team)
        requests = SaveRequests()
        checkpoints = RunCheckpoints(config, team, trainer.order, requests)
        stack.callback(checkpoints.close)
        progress = Progress()
        if resume:
            progress = checkpoints.resume()
            print(f"mindrlhf: resumed after step {progress.step}", flush=True)
        first_step = progress.step + 1 if resume else 0
        sinks = open_sinks(output_dir, first_step=first_step, tensorboard=config.observe.tensorboard)
        stack.callback(sinks.close)
        write_config(config, output_dir)
        requests.listen()
        is_complete = run_steps(trainer, progress, checkpoints, sinks)
        checkpoints.wait()
    if is_complete:
        if summary := trainer.summary(progress):
            print(f"\n{summary}", flush=True)
        # Last, because it marks the run as complete: one that was killed before can be resumed.
        learner.export(output_dir / FINAL_NAME, config.data.tokenizer_dir)
        print(f"model: {output_dir / FINAL_NAME}", flush=True)


def run_steps(trainer: Trainer, progress: Progress, checkpoints: Any, sinks: SinkGroup) -> bool:
    """Train from ``progress`` on, evaluating, reporting and saving on the way.

    Args:
        checkpoints: :class:`mindrlhf.training.checkpoints.run.RunCheckpoints`.

    Returns:
        Whether the last step was reached: a request to end may come before it.
    """
    if progress.step == 0 and (metrics := trainer.evaluate(progress)):
        sinks.write(0, metrics)
    while progress.step < trainer.num_steps:
        checkpoints.begin_step(progress)
        heartbeat.enter(f"step {progress.step + 1}")
        metrics = trainer.step(progress.step, trainer.order.items(progress.step))
        progress.step += 1
        metrics |= trainer.evaluate(progress)
        sinks.write(progress.step, metrics)
        must_stop = checkpoints.must_stop  # read first: what comes while the checkpoint is written ends the next step
        if checkpoints.is_due(progress):
            checkpoints.save(progress)
        if must_stop:
            return False
    return True
