"""The run of a rank, of whatever kind: checked, connected, resumed, stepped through, saved, exported."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindrlhf.config.parse import write_config
from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.config.training import is_split
from mindrlhf.data.fingerprint import data_fingerprint
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.observe.report import REPORT_NAME, write_report
from mindrlhf.observe.run_data import STARTS_NAME
from mindrlhf.observe.sinks import SinkGroup, open_sinks
from mindrlhf.observe.trackers.background import Trackers, open_trackers
from mindrlhf.system import heartbeat
from mindrlhf.system.processes import COMMAND_VARIABLE, has_launcher
from mindrlhf.training.checkpoints.requests import SaveRequests, StopRequested
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.facts import graph_facts
from mindrlhf.training.preflight.output import check_output, holding_directories, too_short
from mindrlhf.training.profiling.ranks import ProfiledWorker
from mindrlhf.training.profiling.steps import StepProfiler
from mindrlhf.training.runtime import (
    is_first_of_node,
    is_rank_0_process,
    num_ranks_from_environment,
    start_runtime,
)
from mindrlhf.training.team import connect, serve

if TYPE_CHECKING:
    from mindrlhf.training.loop.trainer import Trainer
    from mindrlhf.training.offline.run import OfflineTask, OfflineTrainer
    from mindrlhf.training.reinforcement import ReinforcementTask


def train(config: AnyConfig, task: "ReinforcementTask | OfflineTask", *, resume: bool) -> None:
    """Do this rank's part of a run: rank 0 trains and exports the model, the others serve it.

    Raises:
        UserError, RunFailure: as what it calls raises them.
    """
    start_s, output_dir = time.time(), Path(config.run.output_dir)
    with contextlib.ExitStack() as stack:
        if is_rank_0_process():
            if not has_launcher():  # which holds them for all of its attempts
                stack.enter_context(holding_directories(config, "a run started by msrun"))
            check_output(config, resume=resume)
            task.start_early(stack)
        elif is_first_of_node():
            task.start_early_elsewhere(stack)
        output_dir.mkdir(parents=True, exist_ok=True)
        rank = start_runtime(config.run, output_dir / "logs")
        connections = connect(rank)
        heartbeat.enter(heartbeat.JOINED)
        if config.run.device == "cpu" and not is_split(config.parallel_config):
            from mindrlhf.cpu.training.graph_cache import open_graph_cache  # which loads MindSpore

            open_graph_cache(graph_facts(config), rank.index)
        worker = task.build_worker(rank)
        if config.profiler.steps:
            worker = ProfiledWorker(worker, config.profiler, output_dir, rank, task.servers())
        if not rank.is_rank_0:
            serve(worker, connections[0])
            return
        requests = SaveRequests()
        heartbeat.enter("reading the data")
        task.connect(worker, connections, requests, stack)
        _train_on_rank_0(config, task, worker, requests, stack, resume, start_s)


def _train_on_rank_0(
    config: AnyConfig,
    task: "ReinforcementTask | OfflineTask",
    worker: Any,
    requests: SaveRequests,
    stack: contextlib.ExitStack,
    resume: bool,
    start_s: float,
) -> None:
    output_dir = Path(config.run.output_dir)
    checkpoints = RunCheckpoints(config, task.team, task.order, requests, data_fingerprint(vars(config.data)))
    stack.callback(checkpoints.close)
    progress = Progress()
    if resume:
        heartbeat.enter("reading the checkpoint")
        progress = checkpoints.resume()
        print(f"mindrlhf: resumed after step {progress.step}", flush=True)
    first_step = progress.step + 1 if resume else 0
    write_config(config, output_dir)
    sinks, trackers = _open_sinks(config, task, stack, first_step, is_resumed=resume)
    _note_start(output_dir, first_step, start_s)
    if not resume:
        sinks.write_text("config", (output_dir / "config.yaml").read_text(encoding="utf-8"))
    steps = task.open(progress, checkpoints, first_step, stack)
    requests.listen()
    _tell_shortfall(config, steps)
    profiler = StepProfiler(config.profiler, task.team, output_dir)
    is_complete = run_steps(steps, checkpoints, sinks, profiler.step, output_dir)
    profiler.close()
    checkpoints.wait()
    if is_complete:
        sinks.close()
        heartbeat.enter("writing the report and exporting the model")
        task.finish(worker, progress)
        trackers.complete(output_dir / REPORT_NAME)
        _tell_shortfall(config, steps, is_over=True)
    heartbeat.enter(heartbeat.STOPPING)


def run_steps(
    steps: "Trainer | OfflineTrainer",
    checkpoints: RunCheckpoints,
    sinks: SinkGroup,
    profiled: Callable[[int], contextlib.AbstractContextManager[None]] = lambda step: contextlib.nullcontext(),
    output_dir: Path | None = None,
) -> bool:
    """Train to the last step, evaluating, reporting and saving on the way.

    Returns:
        False if the run was asked to end before its last step.
    """
    progress = steps.progress
    steps.begin()
    if progress.step == 0 and (metrics := steps.evaluate()):
        sinks.write(0, metrics)
        if output_dir is not None:
            write_report(output_dir, is_running=True)
    while progress.step < steps.num_steps:
        with profiled(progress.step + 1):
            checkpoints.begin_step(progress)
            try:
                metrics = steps.step()
            except StopRequested:  # the step has changed nothing yet
                checkpoints.save_broken_off(progress)
                return False
            heartbeat.takes_requests()
            evaluated = steps.evaluate()
            sinks.write(progress.step, metrics | evaluated)
            if details := steps.details():
                sinks.write_details(progress.step, details)
            steps.check()
            must_stop = checkpoints.must_stop  # read first: what comes while it is written ends the next step
            if checkpoints.is_due(progress):
                with steps.saving():
                    checkpoints.save(progress)
            if must_stop:
                return False
        if evaluated and progress.step < steps.num_steps and output_dir is not None:
            write_report(output_dir, is_running=True)
    return True


def _open_sinks(
    config: AnyConfig,
    task: "ReinforcementTask | OfflineTask",
    stack: contextlib.ExitStack,
    first_step: int,
    *,
    is_resumed: bool,
) -> tuple[SinkGroup, Trackers]:
    observe, output_dir = config.observe, Path(config.run.output_dir)
    trackers = open_trackers(
        observe.sinks,
        output_dir,
        dataclasses.asdict(config),
        project=observe.project,
        is_resumed=is_resumed,
    )
    stack.callback(trackers.close)
    sinks = open_sinks(
        output_dir,
        first_step=first_step,
        num_steps=task.shown_steps,
        tensorboard="tensorboard" in observe.sinks,
        accuracy=task.accuracy,
        trackers=trackers,
    )
    stack.callback(sinks.close)
    return sinks, trackers


def _tell_shortfall(config: AnyConfig, steps: "Trainer | OfflineTrainer", *, is_over: bool = False) -> None:
    """Say where the data end before ``run.max_steps``, but for what the launcher told: it knows the steps of GRPO."""
    line, step = too_short(config, steps.num_steps), steps.progress.step
    if line and (step == steps.num_steps if is_over else not isinstance(config, GrpoConfig)):
        print(f"mindrlhf: {f'ended after step {step}: ' if is_over else ''}{line}", flush=True)


def _note_start(output_dir: Path, first_step: int, start_s: float) -> None:
    """Keep when this process began, for the total time in the report."""
    writer = JsonlWriter(output_dir / STARTS_NAME, first_step=first_step)
    command, num_ranks = os.environ.get(COMMAND_VARIABLE), num_ranks_from_environment()
    writer.write({"step": first_step, "start_s": start_s, "command": command, "num_ranks": num_ranks})
    writer.close()
