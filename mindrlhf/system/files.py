"""Making sure that what was written is on the disk, and that what a killed process has left goes."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a private directory for the time of the block; remove those of the same prefix that a kill has left.

    Raises:
        OSError: the disk refuses.
    """
    for path in parent.glob(f"{prefix}*"):
        if path.is_dir() and not path.is_symlink() and not is_locked(path):
            shutil.rmtree(path, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with locked(path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a lock on a directory, which the system drops when this process dies, however it dies."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Whether a living process holds the lock of :func:`locked`; False for what is no directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
