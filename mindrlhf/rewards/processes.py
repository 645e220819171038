"""Ending a process together with everything it has started, also what has left its process group (Linux)."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

PROC = "/proc"
# include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A fork bomb under a limit on processes is gone after a few rounds; this bounds the wait for one without a limit.
MAX_ROUNDS = 200
ROUND_INTERVAL_S = 0.005
# Between leaving one program and being in the next, a process shows an empty environment; some show it always.
MAX_ROUNDS_UNKNOWN = 20


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even while it hangs."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that ``kill_tree`` finds daemons too."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(pid: int) -> None:
    """Kill a process of ours, and all its descendants; the process itself is left to be reaped by its parent.

    The process is stopped first, so that it starts nothing new and, if it is a subreaper, keeps its orphans
    below it until they are dead.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    _kill_until_none(lambda: _descendants(pid))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_marked(variable: str, value: str) -> None:
    """Kill every process that was started with ``variable=value`` in its environment.

    For what a dead process has left behind: orphans have no tie to it but the environment they inherited.
    """
    marker = f"{variable}={value}".encode()
    any_unknown = False

    def find() -> list[int]:
        nonlocal any_unknown
        environments = {pid: _environment(pid) for pid in _running_pids()}
        any_unknown = b"" in environments.values()
        return [pid for pid, environment in environments.items() if marker in (environment or b"").split(b"\0")]

    for _ in range(MAX_ROUNDS_UNKNOWN):
        _kill_until_none(find)
        if not any_unknown:
            return
        time.sleep(ROUND_INTERVAL_S)


def _kill_until_none(find: Callable[[], list[int]]) -> None:
    for _ in range(MAX_ROUNDS):
        pids = find()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(ROUND_INTERVAL_S)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    zombies = set()
    for pid in _pids():
        stat = _stat(pid)
        if stat is None:
            continue
        state, parent = stat
        children.setdefault(parent, []).append(pid)
        if state in "ZX":
            zombies.add(pid)
    found, frontier = [], [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        frontier += below
        found += [pid for pid in below if pid not in zombies]
    return found


def _running_pids() -> Iterator[int]:
    own = os.getpid()
    for pid in _pids():
        stat = _stat(pid)
        if pid != own and stat is not None and stat[0] not in "ZX":
            yield pid


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdigit()]
    except FileNotFoundError:  # not Linux
        return []


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process; None once it is gone."""
    try:
        with open(f"{PROC}/{pid}/stat", "rb") as file:
            # The command stands in parentheses and may hold anything, so count from the last one.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1])


def _environment(pid: int) -> bytes | None:
    """The environment a process was started with; None once it is gone, of another user's and the kernel's own."""
    try:
        with open(f"{PROC}/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
