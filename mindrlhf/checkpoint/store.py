"""A directory of checkpoints: each whole or not there, each verified before use, only the newest kept."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindrlhf.checkpoint.manifest import DamagedDirectory, verify, write_manifest
from mindrlhf.errors import UserError
from mindrlhf.system.files import is_locked, remove, unused_name, whole_directory

_STEP_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY_NAME = re.compile(r"\.step_\d{8,}\.[0-9a-f]{8}\.partial")


class CheckpointStore:
    """Checkpoints of one run, ``step_00000100`` and so on, under ``save_dir``, which is made if it is not there.

    What a killed process left half-written is removed; what a living one is writing is not.

    Args:
        save_dir: where the checkpoints lie.
        keep_last: newest checkpoints kept, at least 1.
        only_reads: of a process that may not be the run: nothing is made or removed.

    Raises:
        UserError: the directory cannot be made or read.
    """

    def __init__(self, save_dir: str | os.PathLike, keep_last: int, *, only_reads: bool = False):
        assert keep_last >= 1, f"keep_last is {keep_last}: the checkpoint just written must stay"
        self.save_dir = Path(save_dir)
        self.keep_last = keep_last
        if only_reads:
            return
        try:
            self.save_dir.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
        except OSError as error:
            raise UserError(
                f"checkpoint directory {self.save_dir} cannot be used ({error.strerror}): set checkpoint.save_dir to "
                "a directory that can be written"
            ) from error

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies, or would lie."""
        return self.save_dir / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending; damaged ones count."""
        matches = [_STEP_NAME.fullmatch(name) for name in os.listdir(self.save_dir)]
        return sorted({int(match[1]) for match in matches if match and match[0] == self.path(int(match[1])).name})

    def latest(self, unlisted: re.Pattern[str] | None = None) -> Path | None:
        """Return the newest whole checkpoint, None when there is none; each damaged one is a warning on stderr.

        Args:
            unlisted: see :func:`mindrlhf.checkpoint.manifest.verify`.
        """
        for step in reversed(self.steps()):
            try:
                verify(self.path(step), unlisted)
            except DamagedDirectory as damage:
                print(f"warning: checkpoint {self.path(step)} is skipped: {damage}", file=sys.stderr, flush=True)
            else:
                return self.path(step)
        return None

    @contextlib.contextmanager
    def writing(
        self, step: int, size_bytes: int, best_step: int | None = None, checksums: Mapping[str, str] | None = None
    ) -> Iterator[Path]:
        """Give a temporary directory that becomes the checkpoint of ``step`` when the block ends without an error.

        A checkpoint that the step already has (a damaged one, when a run resumed from an older) is replaced.
        Older ones beyond ``keep_last`` are removed afterwards; newer ones are left alone.

        Args:
            step: optimiser steps done.
            size_bytes: about how much the caller will write; see :meth:`check_space`.
            best_step: its checkpoint is kept however old it is.
            checksums: see :func:`write_manifest`; read when the block ends.

        Raises:
            UserError: the disk has too little room or refuses to write; earlier checkpoints are untouched.
        """
        self.check_space(size_bytes)
        try:
            with whole_directory(self.path(step), replace=True) as temporary:
                yield temporary
                write_manifest(temporary, checksums)
            self._prune(step, best_step)
        except (OSError, UserError) as error:
            # Who writes part of it may have turned the system's error into one that names the temporary directory.
            refusal = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(refusal, OSError):
                raise
            raise UserError(
                f"checkpoint {self.path(step)} cannot be written ({refusal.strerror or refusal}): make room, or set "
                "checkpoint.save_dir to another disk"
            ) from error

    def check_space(self, size_bytes: int) -> None:
        """Compare a size with the free space of the disk; see :func:`check_space`."""
        check_space(self.save_dir, size_bytes)

    def _prune(self, step: int, best_step: int | None) -> None:
        older = [other for other in self.steps() if other < step]
        for other in older[: max(0, len(older) + 1 - self.keep_last)]:
            if other != best_step:
                # Under another name first, so that a kill in the middle leaves no half of it under its own.
                doomed = unused_name(self.path(other))
                os.rename(self.path(other), doomed)
                remove(doomed)

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self.save_dir):
            path = self.save_dir / name
            if _TEMPORARY_NAME.fullmatch(name) and not is_locked(path):
                remove(path)


def check_space(save_dir: Path, size_bytes: int) -> int:
    """Return the free bytes of the disk of a directory, which need not be there yet.

    Raises:
        UserError: a checkpoint of so many bytes does not fit; the message names both.
    """
    existing = next(path for path in (save_dir, *save_dir.absolute().parents) if path.is_dir())
    free_bytes = shutil.disk_usage(existing).free
    if size_bytes > free_bytes:
        raise UserError(
            f"a checkpoint needs {size_bytes} bytes ({_gib(size_bytes)}), but {save_dir} has {free_bytes} "
            f"({_gib(free_bytes)}) free: make room, or set checkpoint.save_dir to another disk"
        )
    return free_bytes


def _gib(size_bytes: int) -> str:
    unit, shift = next((one for one in (("GiB", 30), ("MiB", 20)) if size_bytes >> one[1]), ("KiB", 10))
    return f"{size_bytes / 2**shift:.2f} {unit}"
