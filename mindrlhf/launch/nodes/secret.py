"""The secret that the launchers of a run share: from the environment, or from a file in the shared output directory.

It never stands on a command line, where other users of the machine could read it, and the ranks do not get it.
"""

import contextlib
import os
import secrets
import stat
import time
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.launch.failure_report import say

SECRET_VARIABLE = "MINDRLHF_SECRET"
SECRET_NAME = ".nodes_secret"
_MIN_CHARS = 16
_POLL_INTERVAL_S = 0.2
FIRST_NEWS_S = 10.0  # after which a node that waits says for whom


def make_secret(output_dir: Path) -> bytes:
    """Return the secret on node 0: that of the environment, or of a file that is made when missing.

    Raises:
        UserError: it is short, or the file is open to others.
    """
    if (secret := _from_environment()) is not None:
        return secret
    path = output_dir / SECRET_NAME
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return _read(path)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
    return _read(path)


def wait_for_secret(output_dir: Path, limit_s: float, node_0: str = "node 0") -> bytes:
    """Return the secret on another node, when ``node_0`` has made its file.

    Raises:
        UserError: there is none within ``limit_s``, or as for :func:`make_secret`.
    """
    if (secret := _from_environment()) is not None:
        return secret
    path, start_s, has_said = output_dir / SECRET_NAME, time.monotonic(), False
    while not (path.exists() and path.stat().st_size):
        waited_s = time.monotonic() - start_s
        if waited_s > limit_s:
            raise UserError(
                f"{node_0} has not made {path} within {limit_s:g} s: start node 0, put run.output_dir on a directory "
                f"that all nodes share, or set {SECRET_VARIABLE} to the same secret on all of them"
            )
        if waited_s > FIRST_NEWS_S and not has_said:
            has_said = True
            say(f"waiting: {node_0} has not made {path} for {waited_s:.0f} s")
        time.sleep(_POLL_INTERVAL_S)
        with contextlib.suppress(OSError):
            os.listdir(output_dir)  # has NFS look again
    return _read(path)


def remove_secret(output_dir: Path) -> None:
    """Remove the file, if there is one; the run is over."""
    (output_dir / SECRET_NAME).unlink(missing_ok=True)


def _from_environment() -> bytes | None:
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is None:
        return None
    if len(secret) < _MIN_CHARS:
        raise UserError(f"{SECRET_VARIABLE} has {len(secret)} characters: give at least {_MIN_CHARS} random ones")
    return secret.encode()


def _read(path: Path) -> bytes:
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(f"{path} is not yours alone: remove it, or set {SECRET_VARIABLE} on all nodes")
    return path.read_bytes().strip()
