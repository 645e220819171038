"""When a run's state is saved, and how a run picks it up again; rank 0's part."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindrlhf.checkpoint.algorithm_state import AlgorithmState
from mindrlhf.checkpoint.background import BackgroundWriter
from mindrlhf.checkpoint.leftover import LeftoverSample, leftover_records, load_leftover, save_leftover
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.checkpoint.resume import check_resumable, check_same_teachers
from mindrlhf.checkpoint.state import (
    CRITIC_NAME,
    STATE_NAME,
    EvaluationFile,
    RunState,
    read_state,
    write_state,
)
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.config.derived import needs_critic
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.fingerprint import check_same_data
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.evaluation.best import best_step
from mindrlhf.evaluation.heldout import Evaluation
from mindrlhf.system.run_lock import holding
from mindrlhf.training.checkpoints.node_local import NodeCheckpoints
from mindrlhf.training.checkpoints.parts import SHARDS
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.shards import ShardCheckpoints
from mindrlhf.training.nodes import find_nodes
from mindrlhf.training.preflight import FINAL_NAME, check_free
from mindrlhf.training.replica_team import ReplicaTeam
from mindrlhf.training.team import Team
from mindrlhf.weights.adapters.peft import exported_adapter

AnyConfig = GrpoConfig | SftConfig | DpoConfig | RewardModelConfig


@dataclasses.dataclass
class Progress:
    """Where a run is: all that a checkpoint needs beside weights and optimiser."""

    step: int = 0  # steps done
    weights_version: int = 0  # versions published to the generator
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    algorithm: AlgorithmState = dataclasses.field(default_factory=AlgorithmState)
    # Samples not yet trained on; a step replaces the list and does not change what is in it.
    leftover: list[LeftoverSample] = dataclasses.field(default_factory=list)


def save_dir(config: AnyConfig) -> Path:
    """Return the directory of a run's checkpoints."""
    return Path(config.checkpoint.save_dir or Path(config.run.output_dir) / "checkpoints")


@contextlib.contextmanager
def holding_directories(config: AnyConfig, purpose: str) -> Iterator[None]:
    """Keep other runs out of this one's directories while the body runs; see :mod:`mindrlhf.system.run_lock`.

    Raises:
        UserError: another run that is going on has one of them.
    """
    with contextlib.ExitStack() as stack:
        # Also the one within the other: a third run may be told to save there.
        for directory in dict.fromkeys((Path(config.run.output_dir).resolve(), save_dir(config).resolve())):
            stack.enter_context(holding(directory, purpose))
        yield


def check_output(config: AnyConfig, *, resume: bool) -> None:
    """Refuse to write over an earlier run, before the time is spent; remove an export that a killed run left half done.

    Raises:
        UserError: the run's directories hold a trained model, checkpoints that ``resume`` does not continue, or none
            that it could continue.
    """
    refuse_taken(config, resume=resume)
    output_dir = Path(config.run.output_dir)
    for name in (FINAL_NAME, CRITIC_NAME):
        for pattern in (f".{name}.partial-*", f".{exported_adapter(output_dir / name).name}.*.partial"):
            for unfinished in output_dir.glob(pattern):
                shutil.rmtree(unfinished, ignore_errors=True)


def refuse_taken(config: AnyConfig, *, resume: bool) -> None:
    """Refuse to write over an earlier run, or where nothing can be written; changes nothing.

    Raises:
        UserError: as ``check_output``; or something on the way to the output directory is no directory.
    """
    output_dir, directory = Path(config.run.output_dir), save_dir(config)
    _check_writable("run.output_dir", output_dir)
    _check_writable("checkpoint.save_dir", directory)
    check_free(output_dir / FINAL_NAME)
    has_critic = isinstance(config, GrpoConfig) and needs_critic(config)
    if has_critic and not resume:  # a resumed run may have been killed after it exported the critic
        check_free(output_dir / CRITIC_NAME)
    for name in (FINAL_NAME, CRITIC_NAME):
        if config.lora.rank is not None and not resume:
            check_free(exported_adapter(output_dir / name))
    newest = newest_checkpoint(config)
    if newest is not None and not resume:
        raise UserError(
            f"{newest} is a checkpoint of an earlier run: continue it with --resume, or set another run.output_dir or "
            "checkpoint.save_dir"
        )
    if resume and newest is None:
        raise _nothing_to_resume(directory)


def check_no_file(key: str, directory: Path) -> None:
    """Check that no file stands where a key names a directory, or on the way to it."""
    first = next((parent for parent in (directory, *directory.parents) if parent.exists()), Path())
    if not first.is_dir():
        raise UserError(f"'{key}' is {directory}, but {first} is a file: choose another directory")


def _check_writable(key: str, directory: Path) -> None:
    """Check that the directory that a key names is one that can be written, or that it can be made."""
    check_no_file(key, directory)
    for parent in (directory, *directory.parents):
        if parent.exists():
            if not os.access(parent, os.W_OK | os.X_OK):
                raise UserError(f"'{key}' is {directory}, but {parent} cannot be written: choose another")
            return


def newest_checkpoint(config: AnyConfig) -> Path | None:
    """Return the newest checkpoint of a run, not verified, None when there is none; nothing is made."""
    if not save_dir(config).is_dir():
        return None
    store = CheckpointStore(save_dir(config), config.checkpoint.keep_last, only_reads=True)
    steps = store.steps()
    return store.path(steps[-1]) if steps else None


def check_continues(config: AnyConfig, data: dict[str, Any], teachers: dict[str, str]) -> None:
    """Compare a run with what the checkpoint that it is to continue remembers, before anything starts.

    Args:
        config: of the run.
        data, teachers: fingerprints as in :class:`RunCheckpoints`.

    Raises:
        UserError: config, data or teachers differ in what matters.
    """
    store = CheckpointStore(save_dir(config), config.checkpoint.keep_last, only_reads=True)
    for step in reversed(store.steps() if store.save_dir.is_dir() else []):
        try:
            state = read_state(store.path(step))
        except DamagedDirectory:
            continue  # the run takes the one before, too
        _check_same_run(state, _plain(config), data, teachers)
        return


def _plain(config: AnyConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _check_same_run(state: RunState, config: dict[str, Any], data: dict[str, Any], teachers: dict[str, str]) -> None:
    same = check_same_data(state.data, state.config.get("data", {}), data, config["data"])
    check_resumable(state.config, config, same)
    check_same_teachers(state.teachers, teachers)


class RunCheckpoints:
    """The checkpoints of one run: written when they are due, in the background, and read when it resumes.

    Args:
        stream: the order of the data.
        requests: what signals ask for.
        data: fingerprint of the run's data.
        teachers: digests of its teachers; see `teacher_fingerprint`.
    """

    def __init__(
        self,
        config: AnyConfig,
        team: Team | ReplicaTeam,
        stream: PromptStream | EpochSteps,
        requests: SaveRequests,
        data: dict[str, Any] | None = None,
        teachers: dict[str, str] | None = None,
    ):
        self._section = config.checkpoint
        self._config = _plain(config)
        self._data = data or {}
        self._teachers = teachers or {}
        self._seed = config.run.seed
        self._team = team
        self._stream = stream
        self._requests = requests
        self._store = CheckpointStore(save_dir(config), config.checkpoint.keep_last)
        self._writer = BackgroundWriter()
        self._nodes = self._keep_parts(team) if config.checkpoint.node_local else None
        # A model that is no shard of each rank is one of rank 0.
        savers = team if isinstance(team, ReplicaTeam) else Team(team.rank_0)
        self._shards = self._nodes or ShardCheckpoints(savers, self._writer)
        self._evaluations: list[dict[str, Any]] = []  # those of the progress as JSON, made once each
        self._evaluation_file = EvaluationFile()
        self._begun: tuple[RunState, list[LeftoverSample]] | None = None
        self._saved_step: int | None = None

    def begin_step(self, progress: Progress) -> None:
        """Remember where the run is, for a step that is broken off.

        Raises:
            UserError: the last checkpoint could not be written.
        """
        self._shards.settle(wait=False)
        self._writer.check()
        self._begun = self._state(progress), list(progress.leftover)

    @property
    def must_stop(self) -> bool:
        """Whether the run was asked to end."""
        return self._requests.stop

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that a request to end breaks off; see :meth:`SaveRequests.interruptible`."""
        return self._requests.interruptible()

    def is_due(self, progress: Progress) -> bool:
        """Whether a checkpoint is to be saved after the step just done: by plan, for its accuracy, or on request."""
        every_steps = self._section.every_steps
        is_planned = every_steps > 0 and progress.step % every_steps == 0
        is_best = self._section.keep_best and best_step(progress.evaluations) == progress.step
        return is_planned or is_best or self._requests.save or self._requests.stop

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the whole run; it appears whole or not at all.

        With ``checkpoint.asynchronous`` this returns when the state is copied, and an earlier write has ended.

        Raises:
            UserError: the disk has too little room, or an earlier checkpoint could not be written.
        """
        self._write(self._state(progress), list(progress.leftover), best_step(progress.evaluations))
        if self._requests.save:
            self._requests.save = False
            print(f"mindrlhf: SIGUSR1: saving step {progress.step} in {self._store.path(progress.step)}", flush=True)
        if self._requests.stop:
            self._end_on_request(progress.step)

    def save_broken_off(self, progress: Progress) -> None:
        """Write a checkpoint as of the beginning of a step that was broken off before it changed the weights."""
        assert self._begun is not None and self._begun[0].step == progress.step, "no step was begun"
        state, leftover = self._begun
        if self._saved_step != state.step:
            self._write(state, leftover, best_step(progress.evaluations))
        self._end_on_request(state.step)

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            UserError: the last checkpoint could not be written.
        """
        self._shards.settle(wait=True)
        self._writer.wait()

    def close(self) -> None:
        """Wait as well, while a run ends that may have failed for another reason: an error becomes a warning."""
        try:
            self.wait()
        except (UserError, RunFailure) as error:
            print(f"warning: {error}", file=sys.stderr, flush=True)

    def resume(self) -> Progress:
        """Load the newest whole checkpoint into every rank.

        Raises:
            UserError: there is none, or its config or data differ in what matters.
        """
        # Parts that nodes kept may have been copied together, for one machine.
        unlisted = SHARDS if self._section.node_local else None
        directory = self._nodes.latest() if self._nodes else self._store.latest(unlisted)
        if directory is None:
            raise _nothing_to_resume(self._store.save_dir)
        state = read_state(directory)
        _check_same_run(state, self._config, self._data, self._teachers)
        leftover = load_leftover(directory, state.carried)
        algorithm = AlgorithmState.from_json(state.algorithm_state, str(directory / STATE_NAME))
        self._team.call("restore", directory=str(directory))
        self._stream.restore(state.prompt_stream)
        self._saved_step = state.step
        return Progress(
            step=state.step,
            # The loop publishes first, under the next number: that of the checkpoint.
            weights_version=max(0, state.weights_version - 1),
            evaluations=[Evaluation.from_json(values) for values in state.evaluations],
            algorithm=algorithm,
            leftover=leftover,
        )

    def _state(self, progress: Progress) -> RunState:
        new = progress.evaluations[len(self._evaluations) :]
        self._evaluations = self._evaluations + [evaluation.to_json() for evaluation in new]
        return RunState(
            step=progress.step,
            weights_version=progress.weights_version,
            seed=self._seed,
            prompt_stream=self._stream.state(),
            config=self._config,
            evaluations=self._evaluations,
            algorithm_state=progress.algorithm.to_json(),
            data=self._data,
            teachers=self._teachers,
            carried=leftover_records(progress.leftover),
        )

    def _write(self, state: RunState, leftover: list[LeftoverSample], best: int | None) -> None:
        size_bytes = self._team.rank_0.state_size_bytes()
        size_bytes += sum(array.nbytes for sample in leftover for array in sample.arrays.values())
        self._store.check_space(size_bytes)
        best = best if self._section.keep_best else None

        checksums: dict[str, str] = {}
        writing = self._store.writing(state.step, size_bytes, best, checksums)

        def write_rest(directory: Path) -> None:
            save_leftover(directory, leftover)
            checksums.update(write_state(directory, state, self._evaluation_file))

        self.wait()  # the copy that is still read is about to be overwritten
        self._saved_step = state.step
        part = {"step": state.step, "size_bytes": size_bytes, "best_step": best}
        self._shards.begin(writing, checksums, write_rest, part, copies=self._section.asynchronous)
        if not self._section.asynchronous:
            self.wait()

    def _keep_parts(self, team: Team | ReplicaTeam) -> NodeCheckpoints | None:
        """Have each node keep its part of the checkpoints, where there are several."""
        nodes = find_nodes(team.ranks)
        if len(nodes) == 1:
            return None
        is_cut, parallel = isinstance(team, ReplicaTeam), self._config["parallel_config"]
        return NodeCheckpoints(team.ranks, nodes, self._store, self._writer, is_cut=is_cut, parallel=parallel)

    def _end_on_request(self, step: int) -> None:
        self.wait()
        where = self._store.path(step)
        print(f"mindrlhf: SIGTERM: step {step} is saved in {where}; continue with --resume", flush=True)


def _nothing_to_resume(directory: Path) -> UserError:
    return UserError(f"there is no whole checkpoint to resume from in {directory}: leave out --resume")
