"""Check that all nodes see the same directory: node 0 leaves a random number in it, and the others read it."""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mindrlhf.launch.nodes.facts import Fact
from mindrlhf.system.files import write_file

_NAME = ".nodes_probe"
_LIMIT_S = 5.0  # NFS may remember for seconds that there was no such file
_POLL_INTERVAL_S = 0.2
_FIX = "put it on a file system that all nodes mount, at the same place"
_SHARED = "the directory of node 0"
_OWN = "a disk of each node"
_OWN_FIX = "name a directory on each node's own disk, or set checkpoint.node_local to false"


@contextmanager
def probes(directories: Mapping[str, Path]) -> Iterator[dict[str, str]]:
    """Leave a number in each directory while the body runs, on node 0; return them by key."""
    paths = {key: directory / _NAME for key, directory in directories.items()}
    numbers: dict[Path, str] = {}
    try:
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            numbers[path] = numbers.get(path) or secrets.token_hex(16)
            write_file(path, numbers[path])
        yield {key: numbers[path] for key, path in paths.items()}
    finally:
        for path in numbers:
            path.unlink(missing_ok=True)


def shared_facts(directories: Mapping[str, Path], numbers: Mapping[str, str] | None) -> list[Fact]:
    """Return for each directory whether it is node 0's.

    Args:
        directories: by config key.
        numbers: what :func:`probes` left; None on node 0.
    """
    end_s = time.monotonic() + _LIMIT_S
    return [
        Fact(key, _SHARED if numbers is None else _find(directory, numbers.get(key, ""), end_s), _FIX)
        for key, directory in directories.items()
    ]


def own_facts(directories: Mapping[str, Path], numbers: Mapping[str, str] | None) -> list[Fact]:
    """Return for each directory that it is not node 0's; arguments as for :func:`shared_facts`."""
    return [
        Fact(key, _SHARED if numbers is not None and _holds(directory, numbers.get(key, "")) else _OWN, _OWN_FIX)
        for key, directory in directories.items()
    ]


def _holds(directory: Path, number: str) -> bool:
    try:
        os.listdir(directory)  # has NFS look again
        return (directory / _NAME).read_text(encoding="ascii", errors="replace") == number
    except OSError:
        return False


def _find(directory: Path, number: str, end_s: float) -> str:
    while True:
        if _holds(directory, number):
            return _SHARED
        if time.monotonic() > end_s:
            return f"another directory, {directory}"
        time.sleep(_POLL_INTERVAL_S)
