"""When a run's state is saved, and how a run picks it up again; rank 0's part."""

import contextlib
import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from mindrlhf.checkpoint.algorithm_state import AlgorithmState
from mindrlhf.checkpoint.background import BackgroundWriter
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.checkpoint.resume import check_resumable
from mindrlhf.checkpoint.state import RunState, pack_state, read_progress, read_state, write_state
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.config.schema import AnyConfig
from mindrlhf.data.epochs import EpochSteps
from mindrlhf.data.fingerprint import check_same_data
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.evaluation.heldout import Evaluation, best_step
from mindrlhf.system.workers import Workers
from mindrlhf.training.checkpoints.node_local import NodeCheckpoints
from mindrlhf.training.checkpoints.parts import SHARDS
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.shards import SavesState, ShardCheckpoints, savers_of
from mindrlhf.training.nodes import find_nodes
from mindrlhf.training.preflight.output import nothing_to_resume, save_dir
from mindrlhf.training.replica_team import ReplicaTeam
from mindrlhf.training.team import Team


@dataclasses.dataclass
class Progress:
    """Position of a run: all that a checkpoint needs beside weights and optimiser."""

    step: int = 0  # steps done
    weights_version: int = 0  # versions published to the generator
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    algorithm: AlgorithmState = dataclasses.field(default_factory=AlgorithmState)
    # Records of samples not yet trained on; a step replaces the list and does not change what is in it.
    leftover: list[Any] = dataclasses.field(default_factory=list)


def check_continues(config: AnyConfig, data: dict[str, Any]) -> None:
    """Compare a run with what the checkpoint that it is to continue remembers, before anything starts.

    Args:
        data: fingerprint as in :class:`RunCheckpoints`.

    Raises:
        UserError: config or data differ in what matters.
    """
    store = CheckpointStore(save_dir(config), config.checkpoint.keep_last, only_reads=True)
    for step in reversed(store.steps() if store.save_dir.is_dir() else []):
        try:
            state = read_state(store.path(step))
        except DamagedDirectory:
            continue  # the run takes the one before, too
        for key in _check_same_run(state, _plain(config), data):
            print(f"mindrlhf: the checkpoint has '{key}', which was removed since: it is left out", flush=True)
        return


def _plain(config: AnyConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _check_same_run(state: RunState, config: dict[str, Any], data: dict[str, Any]) -> list[str]:
    same = check_same_data(state.data, state.config.get("data", {}), data, config["data"])
    return check_resumable(state.config, config, same)


class RunCheckpoints:
    """The checkpoints of one run: written when they are due, in the background, and read when it resumes.

    Args:
        stream: the order of the data.
        requests: what signals ask for.
        data: fingerprint of the run's data.
    """

    def __init__(
        self,
        config: AnyConfig,
        team: Team | ReplicaTeam,
        stream: PromptStream | EpochSteps,
        requests: SaveRequests,
        data: dict[str, Any] | None = None,
    ):
        self._section = config.checkpoint
        self._config = _plain(config)
        self._data = data or {}
        self._seed = config.run.seed
        self._team = team
        self._stream = stream
        self._requests = requests
        self._store = CheckpointStore(save_dir(config), config.checkpoint.keep_last)
        self._writer = BackgroundWriter()
        self._nodes = self._keep_parts(team) if config.checkpoint.node_local else None
        self._shards = self._nodes or ShardCheckpoints(savers_of(team), self._writer)
        self._begun: tuple[RunState, list[Any]] | None = None
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
        """True once the run was asked to end."""
        return self._requests.stop

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that a request to end breaks off; see :meth:`SaveRequests.interruptible`."""
        return self._requests.interruptible()

    def is_due(self, progress: Progress) -> bool:
        """Return whether to save the step just done: by plan, for its accuracy, or on request."""
        every_steps = self._section.every_steps
        is_planned = every_steps > 0 and progress.step % every_steps == 0
        is_best = self._section.keep_best and best_step(progress.evaluations) == progress.step
        return is_planned or is_best or self._requests.save or self._requests.stop

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the whole run; it appears whole or not at all.

        This returns when the state is copied, and an earlier write has ended.

        Raises:
            UserError: the disk has too little room, or an earlier checkpoint could not be written.
        """
        self._write(self._state(progress), progress.leftover, progress.evaluations)
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
            self._write(state, leftover, progress.evaluations)
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
            raise nothing_to_resume(self._store.save_dir)
        state = read_state(directory)
        _check_same_run(state, self._config, self._data)
        records = read_progress(directory)
        workers: SavesState = Workers(self._team.call)
        workers.restore(directory=str(directory))
        self._stream.restore(state.prompt_stream)
        self._saved_step = state.step
        return Progress(
            step=state.step,
            # The loop publishes first, under the next number: that of the checkpoint.
            weights_version=max(0, state.weights_version - 1),
            evaluations=records["evaluations"],
            algorithm=state.algorithm,
            leftover=records["leftover"],
        )

    def _state(self, progress: Progress) -> RunState:
        return RunState(
            step=progress.step,
            weights_version=progress.weights_version,
            seed=self._seed,
            prompt_stream=self._stream.state(),
            config=self._config,
            algorithm=copy.deepcopy(progress.algorithm),
            data=self._data,
        )

    def _write(self, state: RunState, leftover: list[Any], evaluations: list[Evaluation]) -> None:
        packed = pack_state(state, {"evaluations": evaluations, "leftover": leftover})
        size_bytes = self._team.rank_0.state_size_bytes() + packed.size_bytes
        self._store.check_space(size_bytes)
        best = best_step(evaluations) if self._section.keep_best else None

        checksums: dict[str, str] = {}
        writing = self._store.writing(state.step, size_bytes, best, checksums)

        def write_rest(directory: Path) -> None:
            checksums.update(write_state(directory, packed))

        self.wait()  # the copy that is still read is about to be overwritten
        self._saved_step = state.step
        part = {"step": state.step, "size_bytes": size_bytes, "best_step": best}
        self._shards.begin(writing, checksums, write_rest, part)

    def _keep_parts(self, team: Team | ReplicaTeam) -> NodeCheckpoints | None:
        """Have each node keep its part of the checkpoints, where there are several."""
        nodes = find_nodes(team.ranks)
        if len(nodes) == 1:
            return None
        is_sharded, parallel = isinstance(team, ReplicaTeam), self._config["parallel_config"]
        return NodeCheckpoints(team.ranks, nodes, self._store, self._writer, is_sharded=is_sharded, parallel=parallel)

    def _end_on_request(self, step: int) -> None:
        self.wait()
        where = self._store.path(step)
        print(f"mindrlhf: SIGTERM: step {step} is saved in {where}; continue with --resume", flush=True)
