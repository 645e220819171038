"""The life of a run, of whatever kind: checked, connected, resumed, stepped through, saved, exported."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mindrlhf.config.parse import write_config
from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.config.training import is_split
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.fingerprint import data_fingerprint
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.observe.report import REPORT_NAME, write_report
from mindrlhf.observe.run_data import STARTS_NAME
from mindrlhf.observe.sinks import SinkGroup, StepDetails, open_sinks
from mindrlhf.observe.trackers.background import open_trackers
from mindrlhf.system import heartbeat
from mindrlhf.system.processes import COMMAND_VARIABLE, has_launcher
from mindrlhf.training.checkpoints.requests import SaveRequests, StopRequested
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.facts import graph_facts, teacher_fingerprint
from mindrlhf.training.preflight.output import check_output, holding_directories, too_short
from mindrlhf.training.profiling.ranks import ProfiledWorker, Servers
from mindrlhf.training.profiling.steps import StepProfiler
from mindrlhf.training.runtime import (
    Rank,
    is_first_of_node,
    is_rank_0_process,
    num_ranks_from_environment,
    start_runtime,
)
from mindrlhf.training.team import Team, connect, serve


class Steps(Protocol):
    """The steps of a run on rank 0; ``begin``, ``check``, ``write_page`` and ``saving`` do nothing by default.

    Attributes:
        progress: where the run is; ``step`` moves it on.
        num_steps: of the whole run.
    """

    progress: Progress
    num_steps: int

    def begin(self) -> None:
        """Do what comes before the first step of this process."""

    def step(self) -> dict[str, float]:
        """Do one step and return its metrics.

        Raises:
            StopRequested: the run was asked to end, and the step has changed nothing yet.
        """

    def details(self) -> StepDetails | None:
        """Return what the last step has beyond its metrics, None when there is nothing."""
        return None

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the evaluation that is due after ``progress.step`` steps, empty when none is."""

    def check(self) -> None:
        """Stop the run if the last step, which is reported by now, demands it.

        Raises:
            RunFailure: it does.
        """

    def write_page(self) -> None:
        """Write the page of the run, where an evaluation has come."""

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Return a context around the saving of a checkpoint."""
        return contextlib.nullcontext()


class Training(Protocol):
    """A kind of training, as a run needs it; the methods are called in this order.

    Attributes:
        team: the ranks, once ``connect`` is done.
        order: the order of the data, once ``connect`` is done.
        shown_steps: the number of steps that the console shows, None to show none; once ``connect`` is done.
        accuracy: what the console calls the metric `eval/accuracy`.
    """

    team: Team
    order: PromptStream | EpochSteps
    shown_steps: int | None
    accuracy: str = "held-out accuracy"

    def start_early(self, stack: contextlib.ExitStack) -> None:
        """On rank 0, start what takes long, before anything else; by default nothing."""

    def start_early_elsewhere(self, stack: contextlib.ExitStack) -> None:
        """On the first rank of each other node, the same; by default nothing."""

    def servers(self) -> Servers | None:
        """Return the rollout servers that this process has started, None when there are none."""
        return None

    def build_worker(self, rank: Rank) -> Any:
        """Return this rank's worker, with the model that the run starts from."""

    def connect(self, worker: Any, connections: list, requests: SaveRequests, stack: contextlib.ExitStack) -> None:
        """On rank 0, connect all that takes part, while the workers have the model that the run starts from."""

    def open(
        self, progress: Progress, checkpoints: RunCheckpoints, first_step: int, stack: contextlib.ExitStack
    ) -> Steps:
        """On rank 0, return the steps that go on from ``progress``, ready to begin.

        Args:
            first_step: see :class:`mindrlhf.observe.records.JsonlWriter`.
        """

    def finish(self, worker: Any, progress: Progress) -> None:
        """On rank 0, sum up a complete run and export its model."""


def run_rank(config: AnyConfig, training: Training, *, resume: bool) -> None:
    """Do this rank's part of a run: rank 0 trains and exports the model, the others serve it.

    Args:
        resume: continue from the newest whole checkpoint.

    Raises:
        UserError, RunFailure: as what it calls raises them.
    """
    start_s, output_dir = time.time(), Path(config.run.output_dir)
    with contextlib.ExitStack() as stack:
        if is_rank_0_process():
            if not has_launcher():  # which holds them for all of its attempts
                stack.enter_context(holding_directories(config, "a run started by msrun"))
            check_output(config, resume=resume)
            training.start_early(stack)
        elif is_first_of_node():
            training.start_early_elsewhere(stack)
        output_dir.mkdir(parents=True, exist_ok=True)
        rank = start_runtime(config.run, output_dir / "logs")
        connections = connect(rank)
        heartbeat.enter(heartbeat.JOINED)
        if config.run.device == "cpu" and not is_split(config.parallel_config):
            from mindrlhf.cpu.training.graph_cache import open_graph_cache  # which loads MindSpore

            open_graph_cache(graph_facts(config), rank.index)
        worker = training.build_worker(rank)
        if config.profiler.steps:
            worker = ProfiledWorker(worker, config.profiler, output_dir, rank, training.servers())
        if rank.is_rank_0:
            _run_rank_0(config, training, worker, connections, stack, resume, start_s)
        else:
            serve(worker, connections[0])


def _run_rank_0(
    config: AnyConfig,
    training: Training,
    worker: Any,
    connections: list,
    stack: contextlib.ExitStack,
    resume: bool,
    start_s: float,
) -> None:
    output_dir = Path(config.run.output_dir)
    requests = SaveRequests()
    heartbeat.enter("reading the data")
    training.connect(worker, connections, requests, stack)
    data = data_fingerprint(vars(config.data))
    order, teachers = training.order, teacher_fingerprint(config)
    checkpoints = RunCheckpoints(config, training.team, order, requests, data, teachers)
    stack.callback(checkpoints.close)
    progress = Progress()
    if resume:
        heartbeat.enter("reading the checkpoint")
        progress = checkpoints.resume()
        print(f"mindrlhf: resumed after step {progress.step}", flush=True)
    first_step = progress.step + 1 if resume else 0
    observe = config.observe
    trackers = open_trackers(
        observe.sinks,
        output_dir,
        dataclasses.asdict(config),
        project=observe.project,
        name=observe.run_name,
        is_resumed=resume,
    )
    stack.callback(trackers.close)
    sinks = open_sinks(
        output_dir,
        first_step=first_step,
        num_steps=training.shown_steps,
        tensorboard="tensorboard" in observe.sinks,
        accuracy=training.accuracy,
        trackers=trackers,
    )
    stack.callback(sinks.close)
    write_config(config, output_dir)
    _note_start(output_dir, first_step, start_s)
    if not resume:
        sinks.write_text("config", (output_dir / "config.yaml").read_text(encoding="utf-8"))
    steps = training.open(progress, checkpoints, first_step, stack)
    requests.listen()
    _tell_shortfall(config, steps)
    profiler = StepProfiler(config.profiler, training.team, output_dir)
    is_complete = run_steps(_Reported(steps, output_dir), checkpoints, sinks, profiler.step)
    profiler.close()
    checkpoints.wait()
    if is_complete:
        sinks.close()
        heartbeat.enter("writing the report and exporting the model")
        training.finish(worker, progress)
        trackers.complete(output_dir / REPORT_NAME)
        _tell_shortfall(config, steps, is_over=True)
    heartbeat.enter(heartbeat.STOPPING)


def _tell_shortfall(config: AnyConfig, steps: Steps, *, is_over: bool = False) -> None:
    """Say where the data end before ``run.max_steps``, but for what the launcher told: it knows the steps of GRPO."""
    line, step = too_short(config, steps.num_steps), steps.progress.step
    if line and (step == steps.num_steps if is_over else not isinstance(config, GrpoConfig)):
        print(f"mindrlhf: {f'ended after step {step}: ' if is_over else ''}{line}", flush=True)


class _Reported:
    """The steps of a run, of which each evaluation has the page of the run written anew."""

    def __init__(self, steps: Steps, output_dir: Path) -> None:
        self._steps, self._output_dir, self._is_due = steps, output_dir, False

    def evaluate(self) -> dict[str, float]:
        """Evaluate, where that is due."""
        metrics = self._steps.evaluate()
        self._is_due = bool(metrics)
        return metrics

    def write_page(self) -> None:
        """Write the page, and warn where that fails."""
        if self._is_due:
            self._is_due = False
            try:
                write_report(self._output_dir, is_running=True)
            except (UserError, RunFailure) as failure:
                print(f"warning: no report: {failure}", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)


def _note_start(output_dir: Path, first_step: int, start_s: float) -> None:
    """Keep when this process began, for the total time in the report."""
    writer = JsonlWriter(output_dir / STARTS_NAME, first_step=first_step)
    command, num_ranks = os.environ.get(COMMAND_VARIABLE), num_ranks_from_environment()
    writer.write({"step": first_step, "start_s": start_s, "command": command, "num_ranks": num_ranks})
    writer.close()


def run_steps(
    steps: Steps,
    checkpoints: RunCheckpoints,
    sinks: SinkGroup,
    profiled: Callable[[int], contextlib.AbstractContextManager[None]] = lambda step: contextlib.nullcontext(),
) -> bool:
    """Train to the last step, evaluating, reporting and saving on the way.

    Args:
        profiled: returns a context around a step, from 1, and what follows it.

    Returns:
        Whether the last step was reached: a request to end may come before it.
    """
    progress = steps.progress
    steps.begin()
    if progress.step == 0 and (metrics := steps.evaluate()):
        sinks.write(0, metrics)
    while progress.step < steps.num_steps:
        steps.write_page()
        with profiled(progress.step + 1):
            if not _run_step(steps, checkpoints, sinks):
                return False
    return True


def _run_step(steps: Steps, checkpoints: RunCheckpoints, sinks: SinkGroup) -> bool:
    """Do the next step and what follows it; return whether the run may go on."""
    progress = steps.progress
    checkpoints.begin_step(progress)
    try:
        metrics = steps.step()
    except StopRequested:
        checkpoints.save_broken_off(progress)
        return False
    metrics |= steps.evaluate()
    sinks.write(progress.step, metrics)
    if details := steps.details():
        sinks.write_details(progress.step, details)
    steps.check()
    must_stop = checkpoints.must_stop  # read first: what comes while the checkpoint is written ends the next step
    if checkpoints.is_due(progress):
        with steps.saving():
            checkpoints.save(progress)
    return not must_stop
