"""Small disks of their own for tests that fill them: a tmpfs, whose room is set from outside while it is used."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


class SmallDisk:
    """A tmpfs at ``path``, which is unmounted in the end."""

    def __init__(self, path: Path):
        self.path = path

    def allow_files(self, count: int) -> bool:
        """Set how many files it takes in all, 0 for any number; False when there are more already.

        A disk without a free inode refuses a new file as a full one does, with ENOSPC, but free bytes it still shows:
        so a check beforehand does not notice.
        """
        return _run("mount", "-o", f"remount,nr_inodes={count}", self.path)


@contextlib.contextmanager
def mounted(path: Path, size: str) -> Iterator[SmallDisk | None]:
    """Mount a disk of ``size`` (as "1m") at a new directory; yield None where this user may not."""
    path.mkdir(parents=True)
    if not _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", path):
        yield None
        return
    try:
        yield SmallDisk(path)
    finally:
        # Also while a process that failed to end still uses it.
        assert _run("umount", "--lazy", path), f"{path} is still mounted: umount it by hand"


def _run(*arguments: object) -> bool:
    try:
        finished = subprocess.run([*map(str, arguments)], capture_output=True, timeout=30)
    except FileNotFoundError:
        return False
    return finished.returncode == 0
