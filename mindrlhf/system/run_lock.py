"""One run to a directory: a lock that its owner holds as long as it lives.

The lock is the kernel's (``flock``): it ends with its owner, however that ends, so nothing has to be guessed about a
lock that was left behind; NFS passes it on to its server. The file says who the owner is, for the message to others.
Where a file system has no locks, the file alone decides: an owner on this host is looked up, one on another host is
taken to be alive.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.system.processes import start_ticks

LOCK_NAME = ".lock"
# What a file system says that cannot lock.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_BUSY = (errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def holding(directory: Path, purpose: str) -> Iterator[None]:
    """Hold the lock of ``directory``, which is made when missing, while the body runs.

    Args:
        directory: of a run.
        purpose: what the owner is, as others read it: "mindrlhf train".

    Raises:
        UserError: somebody else holds it, or the directory cannot be written.
    """
    path, is_new = directory / LOCK_NAME, not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _open_locked(path)
    except OSError as error:
        raise UserError(f"{path} cannot be locked ({error.strerror or error}): choose another run.output_dir") from None
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_describe(purpose)).encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while it is held: whoever waits for it sees that it is gone
        os.close(descriptor)
        if is_new:
            with contextlib.suppress(OSError):
                directory.rmdir()  # only what is empty goes


def refuse_held(directory: Path) -> None:
    """Raise ``UserError`` when a living process of this host holds the lock of ``directory``; touches nothing.

    For a look before the lock is taken, which alone decides.
    """
    path = directory / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        owner = _owner(descriptor)
    finally:
        os.close(descriptor)
    if owner.get("host") == socket.gethostname() and not _has_ended(owner):
        raise _held(path, owner)


def is_held(directory: Path) -> bool:
    """Return True if a living process of this host holds the lock of ``directory``."""
    try:
        refuse_held(directory)
    except UserError:
        return True
    return False


def _open_locked(path: Path) -> int:
    """Return a descriptor of the locked file; a file that its last owner removes meanwhile is opened anew."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _BUSY:
                    raise _held(path, _owner(descriptor)) from None
                if error.errno not in _NO_LOCKS:
                    raise
                owner = _owner(descriptor)
                if owner and not _has_ended(owner):
                    raise _held(path, owner, advice=f" (if that run has ended, remove {path})") from None
            if _is_still(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _describe(purpose: str) -> dict[str, object]:
    return {
        "purpose": purpose,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot": _boot_id(),
        # Together with the boot it tells this process from a later one with its number.
        "start_ticks": start_ticks(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _owner(descriptor: int) -> dict[str, object]:
    """Return what the file says of its owner; nothing when it is empty or damaged."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _has_ended(owner: dict[str, object]) -> bool:
    if owner.get("host") != socket.gethostname():
        return False
    if owner.get("boot") != _boot_id():
        return True
    pid = owner.get("pid")
    return not isinstance(pid, int) or start_ticks(pid) != owner.get("start_ticks")


def _held(path: Path, owner: dict[str, object], advice: str = "") -> UserError:
    if not owner:
        who = "another process"
    else:
        who = f"{owner.get('purpose')} (process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')})"
    return UserError(
        f"{path.parent} belongs to a run that is going on, {who}: wait for it, end it, or set another "
        f"run.output_dir or checkpoint.save_dir{advice}"
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
