"""A node's part of a checkpoint, on a disk of its own; see :mod:`mindrlhf.training.checkpoints.node_local`."""

import contextlib
import re
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.manifest import DamagedDirectory, list_files, verify
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.training.results import NodePart

# Files of one rank of a sharded model; those of ranks of other nodes were copied there.
SHARDS = re.compile(r"((?:[^/]+/)*rank_(\d+))/[^/]+")


class KeepsPart:
    """The part of the first rank of each node but rank 0's; its public methods are called through the team."""

    def __init__(self) -> None:
        self._part_store: CheckpointStore | None = None
        self._part: tuple[Path, dict[str, str], contextlib.ExitStack] | None = None

    def keep_part(self, save_dir: str, keep_last: int) -> NodePart:
        """Use a directory of this node; return the steps that have a part there, none where ``save_dir`` is empty."""
        if not save_dir:
            return NodePart()
        self._part_store = CheckpointStore(save_dir, keep_last)
        return NodePart(steps=tuple(self._part_store.steps()))

    def open_part(self, step: int, size_bytes: int, best_step: int | None) -> NodePart:
        """Return the path at which this node's part of a checkpoint is to be written; empty on other ranks.

        Raises:
            UserError: the disk has too little room.
        """
        if self._part_store is None:
            return NodePart()
        stack, checksums = contextlib.ExitStack(), {}
        path = stack.enter_context(self._part_store.writing(step, size_bytes, best_step, checksums))
        self._part = path, checksums, stack
        return NodePart(path=str(path))

    def close_part(self, files: dict[str, np.ndarray], checksums: dict[str, str]) -> None:
        """Add the small files to the part and put it in place; its manifest marks it as whole.

        Args:
            files: uint8, by relative path; they do not replace what ranks of this node wrote.
            checksums: of what they wrote.

        Raises:
            UserError: the disk refuses; nothing of the part is left.
        """
        if self._part is None:
            return
        (path, known, stack), self._part = self._part, None
        with stack:
            known.update(checksums)
            for name, content in files.items():
                if not (path / name).exists():
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    (path / name).write_bytes(content.tobytes())

    def check_part(self, step: int) -> NodePart:
        """Return what is wrong with this node's part of a checkpoint, and the ranks whose shards lie there."""
        if self._part_store is None:
            return NodePart()
        return part_state(self._part_store.path(step))


def part_state(directory: Path) -> NodePart:
    """Return what :meth:`KeepsPart.check_part` does of a directory."""
    try:
        verify(directory, unlisted=SHARDS)
    except DamagedDirectory as damage:
        return NodePart(damage=str(damage))
    matches = map(SHARDS.fullmatch, list_files(directory))
    return NodePart(shards=tuple(sorted({match[1] for match in matches if match})))
