"""Checkpoints that all ranks write, each the shards it holds, while the next steps go on.

Rank 0 opens the checkpoint's temporary directory and asks every rank to begin; each copies its shards and writes the
copy in a thread. At the following steps rank 0 asks who is done; when all are, it adds what is small, and a thread
of its own puts the directory in place. Nothing but these calls passes between the ranks.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.checkpoint.background import BackgroundWriter, CopyBuffers
from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.errors import UserError
from mindrlhf.shards.merge import merge_directory
from mindrlhf.system.files import remove, scratch_directory
from mindrlhf.system.workers import Workers
from mindrlhf.training.checkpoints.parts import KeepsPart
from mindrlhf.training.replica_team import ReplicaTeam
from mindrlhf.training.results import SavedShards, SavingState
from mindrlhf.training.team import Team
from mindrlhf.weights.adapters.peft import exported_adapter


class SavesState(KeepsPart):
    """The part of a rank; its public methods are called through the team. A mixin that needs ``state_writer``.

    Every rank that holds a shard saves it. A whole model is one shard, which rank 0 saves.
    """

    def __init__(self) -> None:
        KeepsPart.__init__(self)
        self._copies = CopyBuffers()
        self._shard_writer = BackgroundWriter()
        self._checksums: dict[str, str] = {}

    def state_writer(self, hold: Callable) -> StateWriter:
        """Return the function that writes this rank's state; ``hold`` takes a name and its arrays first."""
        raise NotImplementedError

    def restore(self, directory: str) -> None:
        """Load what was written to the directory of a checkpoint."""
        raise NotImplementedError

    def begin_saving(self, directory: str, copies: bool) -> None:
        """Begin to write this rank's part of a checkpoint.

        Args:
            directory: of the checkpoint, the same on all ranks of a node; empty where this rank writes nothing.
            copies: write a copy, in a thread, so that the weights may change meanwhile; it is valid until the next
                one. Without, all is written when this returns.

        Raises:
            UserError: the disk refused, now or when the part before was written.
        """
        if not directory:
            self._checksums = {}
        elif copies:
            write = self.state_writer(self._copies.copy)
            self._shard_writer.start(lambda: self._write_shards(write, Path(directory)))
        else:
            self._write_shards(self.state_writer(lambda _, arrays: arrays), Path(directory))

    def is_saving(self) -> SavingState:
        """Return whether this rank is still writing."""
        return SavingState(self._shard_writer.is_running)

    def end_saving(self) -> SavedShards:
        """Return the checksums of what was written, when it is.

        Raises:
            UserError: the disk refused.
        """
        self._shard_writer.wait()
        return SavedShards(self._checksums)

    def _write_shards(self, write: StateWriter, directory: Path) -> None:
        try:
            self._checksums = write(directory)
        except OSError as error:
            raise UserError(
                f"shards cannot be written to {directory} ({error.strerror or error}): make room, or set "
                "checkpoint.save_dir to another disk"
            ) from error


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that ranks are writing."""

    directory: Path
    writing: contextlib.ExitStack  # whose end puts it in place, or removes it after an error
    checksums: dict[str, str]
    write_rest: Callable[[Path], None]


class ShardCheckpoints:
    """The part of rank 0: at most one checkpoint is being written.

    Args:
        team: the writers: all ranks, or replicas, or rank 0 alone; their workers have :class:`SavesState`.
        writer: runs what rank 0 need not wait for; everything where it writes alone.
    """

    def __init__(self, team: ReplicaTeam | Team, writer: BackgroundWriter):
        self._team = team
        self._workers: SavesState = Workers(team.call)
        self._writer = writer
        self._pending: _Pending | None = None

    def begin(
        self,
        writing: contextlib.AbstractContextManager[Path],
        checksums: dict[str, str],
        write_rest: Callable[[Path], None],
        part: Mapping[str, Any],
    ) -> None:
        """Have all ranks begin; returns when they have copied their shards.

        Args:
            writing: of :meth:`CheckpointStore.writing`, not entered, with these ``checksums``.
            checksums: gets those of the shards.
            write_rest: writes what rank 0 adds.
            part: "step", "size_bytes" and "best_step", for nodes that keep a part of their own.

        Raises:
            UserError, RunFailure: the disk refuses, or a rank died.
        """
        assert self._pending is None, "a checkpoint is being written"
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(writing)
            self._begin_ranks(directory, part)
            pending = _Pending(directory, stack.pop_all(), checksums, write_rest)
        if self._team.num_devices == 1:
            self._writer.start(lambda: self._complete(pending).close())
        else:
            self._pending = pending

    def settle(self, *, wait: bool) -> None:
        """Put the checkpoint in place, in the background, if all ranks have written their part, or ``wait`` for them.

        Raises:
            UserError, RunFailure: a rank could not write, or died; nothing of the checkpoint is left.
        """
        if self._pending is None:
            return
        if not wait and any(result.is_saving for result in self._workers.is_saving()):
            return
        pending, self._pending = self._pending, None
        self._writer.start(self._complete(pending).close)

    def _complete(self, pending: _Pending) -> contextlib.ExitStack:
        """Wait for what ranks write, and add the rest; the end of what is returned puts the checkpoint in place."""
        with pending.writing as stack:
            saved = [result.checksums for result in self._workers.end_saving()]
            pending.checksums.update(self._own_checksums(saved))
            pending.write_rest(pending.directory)
            self._close_parts(pending.directory, saved)
            return stack.pop_all()

    def _begin_ranks(self, directory: Path, part: Mapping[str, Any]) -> None:
        self._workers.begin_saving(directory=str(directory), copies=True)

    def _own_checksums(self, saved: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Return the checksums of what lies in rank 0's directory."""
        return {name: value for checksums in saved for name, value in checksums.items()}

    def _close_parts(self, directory: Path, saved: Sequence[Mapping[str, str]]) -> None:
        """Put in place what other nodes hold; an error removes the checkpoint."""


def savers_of(team: ReplicaTeam | Team) -> ReplicaTeam | Team:
    """Return who saves a model: who holds its shards, or rank 0 alone where each rank has a replica."""
    return team if isinstance(team, ReplicaTeam) else Team(team.rank_0)


def export_adapters(team: ReplicaTeam | Team, models: Mapping[str, Path]) -> None:
    """Write the adapters whose shards the ranks hold in PEFT's format, beside the places of exported models.

    One that is there already is that of a run that was killed before it exported the model.

    Raises:
        UserError, RunFailure: the disk refuses, or a rank died.
    """
    with scratch_directory(next(iter(models.values())).parent, ".adapter-shards-") as shards:
        savers: SavesState = Workers(savers_of(team).call)
        savers.begin_saving(directory=str(shards), copies=False)
        savers.end_saving()
        for name, model_dir in models.items():
            directory = exported_adapter(model_dir)
            remove(directory)
            merge_directory(shards / name, directory)
