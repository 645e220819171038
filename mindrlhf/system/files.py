"""Files that are there whole or not at all, and that what a killed process has left goes.

What appears under its name was first written beside it under a temporary one and forced to the disk. All files and
directories that somebody reads later are written so; logs and JSON lines grow in place instead.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

_TAIL_BYTES = 1 << 20  # of a log


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Force every file and directory below, and ``directory`` itself, to the disk."""
    for root, _, names in os.walk(directory):
        for name in names:
            sync(Path(root) / name)
        sync(Path(root))


def partial_path(path: Path) -> Path:
    """The name of a file that is being written."""
    return path.with_name(f".{path.name}.partial")


def put_in_place(temporary: Path, path: Path) -> None:
    """Force a finished file to the disk and give it its name; ``temporary`` is gone afterwards, also after an error.

    Raises:
        OSError: the disk refuses.
    """
    try:
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO]:
    """Open a file for writing that appears under its name when the block ends without an error; else nothing changes.

    Args:
        mode: "wb", or "w" for UTF-8 text.
        options: of ``open``.

    Raises:
        OSError: the disk refuses.
    """
    if "b" not in mode:
        options = {"encoding": "utf-8", **options}
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe, which nothing may replace
        with open(path, mode, **options) as file:
            yield file
        return
    temporary = partial_path(path)
    try:
        with open(temporary, mode, **options) as file:
            yield file
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes, **options: Any) -> None:
    with whole_file(path, "w" if isinstance(content, str) else "wb", **options) as file:
        file.write(content)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object to a file; see :func:`whole_file`."""
    write_file(path, json.dumps(value, indent=1) + "\n")


@contextlib.contextmanager
def whole_directory(path: Path, *, temporary: Path | None = None, replace: bool = False) -> Iterator[Path]:
    """Give a directory that takes the name ``path`` when the block ends without an error; else nothing changes.

    It is locked during the block, so that others can tell it from what a killed process has left.

    Args:
        temporary: its name during the block; None for a random one beside ``path``.
        replace: whether what lies at ``path`` goes; if not, it must be nothing or an empty directory.

    Raises:
        OSError: the disk refuses, or something lies at ``path``.
    """
    temporary = temporary or unused_name(path)
    try:
        temporary.mkdir(parents=True)
        with locked(temporary):
            yield temporary
            sync_tree(temporary)
            replaced = unused_name(path)
            if replace and os.path.lexists(path):
                os.rename(path, replaced)
            os.rename(temporary, path)
            sync(path.parent)
            remove(replaced)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unused_name(path: Path) -> Path:
    """A temporary name beside ``path`` that nobody else has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def remove(path: Path) -> None:
    """Remove a directory, a file or a link; nothing happens when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a private directory for the time of the block; remove those of the same prefix that a kill has left.

    Raises:
        OSError: the disk refuses.
    """
    path, lock = take_directory(parent, prefix)
    try:
        yield path
    finally:
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def remove_unheld(parent: Path, prefix: str) -> None:
    """Remove the directories of :func:`take_directory` that nobody holds any more."""
    for path in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        # Held while it is removed: its maker, who is about to lock it, then sees that it has to make another.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def take_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a private directory and lock it; remove those of the same prefix that a kill has left.

    Returns:
        The directory, and a descriptor that holds its lock until it and all copies of it are closed.

    Raises:
        OSError: the disk refuses.
    """
    remove_unheld(parent, prefix)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process tidied up between the two
            continue
        is_free = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is tidying up: it took this for a directory that was left
            is_free = False
        except OSError:  # some network file systems have no locks
            pass
        if is_free and path.exists():
            return path, lock
        os.close(lock)


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
    """Return True if a living process holds the lock of :func:`locked`; False for what is no directory."""
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


def last_lines(path: Path, num_lines: int, is_worth_showing: Callable[[str], bool] = lambda line: True) -> list[str]:
    """Return the last lines of a log that are not blank and worth showing; none when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line.strip() and is_worth_showing(line)][-num_lines:]
