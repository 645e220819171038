"""A node's part of a checkpoint, on a disk of its own; see :mod:`mindrlhf.training.checkpoints.node_local`."""

import contextlib
import re
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.manifest import DamagedDirectory, list_files, verify, write_manifest
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.system import processes
from mindrlhf.system.files import sync_tree
from mindrlhf.training.batch import HeldSteps, Machine, PartPath, PartState

# What one rank wrote of a model that is cut. Beside what its node wrote, it was copied there.
SHARDS = re.compile(r"((?:[^/]+/)*rank_(\d+))/[^/]+")


class KeepsPart:
    """The part of the first rank of each node but rank 0's; its public methods are called through the team."""

    def __init__(self) -> None:
        self._part_store: CheckpointStore | None = None
        self._part: tuple[Path, contextlib.ExitStack] | None = None
        self._checksums_of_part: dict[str, str] = {}

    def keep_part(self, save_dir: str, keep_last: int) -> HeldSteps:
        """Use a directory of this node; return the steps that have a part there, none where ``save_dir`` is empty."""
        if not save_dir:
            return HeldSteps([])
        self._part_store = CheckpointStore(save_dir, keep_last)
        return HeldSteps(self._part_store.steps())

    def machine(self) -> Machine:
        """Return where this rank is."""
        return Machine(processes.machine())

    def open_part(self, step: int, size_bytes: int, best_step: int | None) -> PartPath:
        """Return where this node's part of a checkpoint is to be written; empty on other ranks.

        Raises:
            UserError: the disk has too little room.
        """
        if self._part_store is None:
            return PartPath("")
        stack, self._checksums_of_part = contextlib.ExitStack(), {}
        writing = self._part_store.writing(step, size_bytes, best_step, self._checksums_of_part)
        path = stack.enter_context(writing)
        self._part = path, stack
        return PartPath(str(path))

    def prepare_part(self, files: dict[str, np.ndarray], checksums: dict[str, str]) -> None:
        """Make the part whole under its temporary name.

        Args:
            files: what is small, uint8, by relative path; it does not replace what ranks of this node wrote.
            checksums: of what they wrote.

        Raises:
            UserError: the disk refuses.
        """
        if self._part is None:
            return
        path, stack = self._part
        self._checksums_of_part.update(checksums)
        with stack:  # an error removes the part
            for name, content in files.items():
                if not (path / name).exists():
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    (path / name).write_bytes(content.tobytes())
            write_manifest(path, self._checksums_of_part)
            sync_tree(path)
            self._part = path, stack.pop_all()

    def finish_part(self) -> None:
        """Give the part its own name, and remove those that are too old."""
        if self._part is not None:
            (_, stack), self._part = self._part, None
            stack.close()

    def check_part(self, step: int) -> PartState:
        """Return whether this node's part of a checkpoint is whole, and which ranks' shards lie there."""
        if self._part_store is None:
            return PartState("", [])
        return part_state(self._part_store.path(step))


def part_state(directory: Path) -> PartState:
    """Return what :meth:`KeepsPart.check_part` does of a directory."""
    try:
        verify(directory, unlisted=SHARDS)
    except DamagedDirectory as damage:
        return PartState(str(damage), [])
    matches = map(SHARDS.fullmatch, list_files(directory))
    return PartState("", sorted({match[1] for match in matches if match}))
