"""Processes on Linux: who descends from whom, how they ended, how to end them all, and that none outlives its parent.

Nothing here imports MindSpore or vLLM: the launcher, its workers, the rollout server and verifiers all use it.
"""

import contextlib
import ctypes
import os
import signal
import site
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

LAUNCHER_PID_VARIABLE = "MINDRLHF_LAUNCHER_PID"
COMMAND_VARIABLE = "MINDRLHF_COMMAND"  # the command line that starts a run, for its report
STARTER_VARIABLE = "MINDRLHF_STARTER_PID"  # the process that started a ``Child``
# Set for a child and inherited by all it starts, so that what survives its death can be found.
MARKER = "MINDRLHF_WORKER"
NUM_NODES_VARIABLE = "MINDRLHF_NUM_NODES"  # on how many machines the launchers of a run start ranks
# How the private directory of a rollout server begins, among temporary files.
SERVER_PREFIX = "mindrlhf-server-"

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_PR_SET_NO_NEW_PRIVS = 38
# proc(5): fields 22 and 52, counted from 1; fields[0] is field 3.
_START_TIME_FIELD = 22 - 3
_EXIT_CODE_FIELD = 52 - 3
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# wait(2)
_CORE_DUMPED = 0x80
# A fork bomb under a limit on processes is gone after a few rounds; this bounds the wait for one without a limit.
_MAX_ROUNDS = 200
_ROUND_INTERVAL_S = 0.005
# Between leaving one program and being in the next, a process shows an empty environment; some show it always.
_MAX_ROUNDS_UNKNOWN = 20


@dataclass(frozen=True)
class ProcessStatus:
    """Fields of ``/proc/PID/stat``; ``returncode`` as in ``subprocess``, and None while the process runs."""

    pid: int
    parent_pid: int
    returncode: int | None


def read_status(pid: int) -> ProcessStatus | None:
    """Return the status of a process, or None when there is no such process (any more)."""
    fields = _stat_fields(pid)
    if not fields:
        return None
    state, parent_pid, wait_status = fields[0], int(fields[1]), int(fields[_EXIT_CODE_FIELD])
    if state not in "ZX":
        return ProcessStatus(pid, parent_pid, None)
    return ProcessStatus(pid, parent_pid, os.waitstatus_to_exitcode(wait_status & ~_CORE_DUMPED))


def state(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as "T" for stopped; empty when there is none."""
    fields = _stat_fields(pid)
    return fields[0] if fields else ""


def thread_states(pid: int) -> set[str]:
    """Return the letters of ``state`` for all threads of a process; none when there is no such process."""
    with contextlib.suppress(OSError):
        return {fields[0] for tid in os.listdir(f"/proc/{pid}/task") if (fields := _stat_fields(f"{pid}/task/{tid}"))}
    return set()


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine's boot; 0 when it has ended or never was."""
    fields = _stat_fields(pid)
    return int(fields[_START_TIME_FIELD]) if fields and fields[0] not in "ZX" else 0


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty when it cannot be read."""
    entries = (_environment(pid) or b"").split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def command_line(pid: int) -> list[str]:
    """Return the words that a process was started with; none when they cannot be read."""
    try:
        return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


def shared_memory_files(pid: int) -> set[str]:
    """Return the files in ``/dev/shm`` that a process has mapped; none when it cannot be looked at."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    # proc(5): address, permissions, offset, device, inode, path
    paths = {line.split(maxsplit=5)[-1] for line in lines if " /dev/shm/" in line}
    return {path for path in paths if not path.endswith(" (deleted)")}


def descendants(root_pid: int, *, except_trees: Collection[int] = ()) -> list[ProcessStatus]:
    """Return every descendant of a process, parents first, zombies included.

    ``except_trees`` names processes that are left out together with their own descendants.
    """
    children: dict[int, list[ProcessStatus]] = {}
    for status in _all_processes():
        children.setdefault(status.parent_pid, []).append(status)
    found, frontier = [], [root_pid]
    while frontier:
        for status in children.get(frontier.pop(), []):
            if status.pid not in except_trees:
                found.append(status)
                frontier.append(status.pid)
    return found


def kill_tree(pid: int) -> None:
    """Kill a process of ours, and all its descendants; the process itself is left to be reaped by its parent.

    The process is stopped first, so that it starts nothing new and, if it is a subreaper, keeps its orphans
    below it until they are dead.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    _kill_until_none(lambda: [status.pid for status in descendants(pid) if status.returncode is None])
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_marked(variable: str, value: str) -> None:
    """Kill every process but this one that was started with ``variable=value`` in its environment.

    For what a dead process has left behind: orphans have no tie to it but the environment they inherited.
    """
    marker = f"{variable}={value}".encode()
    any_unknown = False

    def find() -> list[int]:
        nonlocal any_unknown
        running = [status.pid for status in _all_processes() if status.returncode is None and status.pid != os.getpid()]
        environments = {pid: _environment(pid) for pid in running}
        any_unknown = b"" in environments.values()
        return [pid for pid, environment in environments.items() if marker in (environment or b"").split(b"\0")]

    for _ in range(_MAX_ROUNDS_UNKNOWN):
        _kill_until_none(find)
        if not any_unknown:
            return
        time.sleep(_ROUND_INTERVAL_S)


def _kill_until_none(find: Callable[[], list[int]]) -> None:
    for _ in range(_MAX_ROUNDS):
        pids = find()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_INTERVAL_S)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that ``kill_tree`` finds daemons too."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the new parent of any descendant whose own parent dies, so that none is lost from sight."""
    previous = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(previous))
    adopt_orphans()
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, previous.value)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends.

    Args:
        parent_pid: the parent this process was meant to have; if it has already gone, this one ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # which a hung collective cannot block
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_starter() -> None:
    """Call first in the main of a program that a ``child.Child`` runs: it ends with the thread that started it."""
    die_with_parent(int(os.environ[STARTER_VARIABLE]))


def hide_from_others(is_hidden: bool = True) -> None:
    """Keep programs of the same user from looking into this process, or let them."""
    _prctl(_PR_SET_DUMPABLE, int(not is_hidden))


def refuse_new_rights() -> None:
    """Let no program that this process starts get more rights than it has, for good."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


@contextlib.contextmanager
def handling(numbers: Collection[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Have signals handled; outside the main thread, where Python allows no handlers, nothing is done."""
    previous = {}
    with contextlib.suppress(ValueError):
        for number in numbers:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


def machine() -> str:
    """Return what processes that see each other in ``/proc`` have in common: they share a machine, or a container."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"


def prepare_children() -> None:
    """Have what this process starts find this package, which ``python -P`` does not look for in the working directory,
    and reach this machine itself without a proxy.
    """
    root = str(Path(__file__).parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths and root not in site.getsitepackages():
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, root])
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
        os.environ[name] = ",".join([*hosts, *(host for host in _LOOPBACK if host not in hosts)])


def has_launcher() -> bool:
    """Return True if ``mindrlhf.launch.launch`` started this process or an ancestor."""
    return LAUNCHER_PID_VARIABLE in os.environ


def die_with_launcher() -> None:
    """Call first in a worker's main: a worker of ``mindrlhf.launch.launch`` does not outlive a killed launcher.

    Does nothing under a plain ``msrun``, which may return before its workers (``--join=False``).
    """
    launcher_pid = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher_pid is None:
        return
    die_with_parent()
    if read_status(int(launcher_pid)) is None:
        os.kill(os.getpid(), signal.SIGKILL)


def signal_all(pids: Collection[int], signal_number: int) -> None:
    """Send a signal to every process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def _all_processes() -> Iterator[ProcessStatus]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := read_status(int(entry))) is not None:
            yield status


def _environment(pid: int) -> bytes | None:
    """The environment a process was started with; None once it is gone, of another user's and the kernel's own."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; none when there is no such process, or thread."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The second field is the program's name in brackets and may itself hold spaces and brackets.
    return text.rpartition(")")[2].split()


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
