"""Signs of life: each rank says in a small file what it does and, once a second, how much it has done.

The launcher reads the files (see :mod:`mindrlhf.launch.health`). There is one heartbeat per process, so the
functions need no object; until ``start`` they do nothing, as in tests and in ranks started by a plain ``msrun``.
"""

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mindrlhf.system import progress

DIRECTORY_VARIABLE = "MINDRLHF_HEARTBEAT_DIR"
DUMP_SIGNAL = signal.SIGUSR2  # has the rank write the stacks of all its threads to its log
ROUSE_SIGNAL = signal.SIGURG  # has a rank that sleeps in its search for the others look again; else nothing
INTERVAL_S = 1.0
STARTING = "starting"
JOINING = "joining the other ranks"  # the activity while MindSpore's ranks look for each other
JOINED = "building the model"  # what a rank does once it has found them
STOPPING = "stopping the servers and the ranks"
# Records of one size are written over each other in a single call, so that a reader never sees half of one.
_RECORD_BYTES = 256
_MAX_ACTIVITY_CHARS = 100


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank."""

    pid: int
    num_ticks: int  # grows with every piece of work done
    activity: str
    progress: str = ""  # "12 of 128 samples"; see :mod:`mindrlhf.system.progress`
    saves: bool = False  # it has trained a step, and SIGTERM asks it for a checkpoint


class _Heartbeat:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._num_ticks = 0
        self._activity = STARTING
        self.saves = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.write()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(INTERVAL_S)
            self.write()

    def enter(self, activity: str) -> None:
        self._num_ticks += 1
        if activity != self._activity:
            self._activity = activity
            self.write()

    def tick(self) -> None:
        self._num_ticks += 1

    def write(self) -> None:
        with self._lock:
            activity = self._activity.encode("ascii", "replace").decode()[:_MAX_ACTIVITY_CHARS]
            record = json.dumps(asdict(Beat(os.getpid(), self._num_ticks, activity, progress.now(), self.saves)))
            with contextlib.suppress(OSError):  # a full disk must not end a run that a missed beat would not
                os.pwrite(self._file, record.ljust(_RECORD_BYTES - 1).encode() + b"\n", 0)


_current: _Heartbeat | None = None


def start() -> None:
    """Begin to beat, if the launcher of this process asked for it, and prepare for ``DUMP_SIGNAL``.

    Call it once, first thing in a rank: without it ``DUMP_SIGNAL`` would end the process.
    """
    global _current
    directory, rank = os.environ.get(DIRECTORY_VARIABLE), os.environ.get("RANK_ID")
    if directory is None or rank is None or os.environ.get("MS_ROLE") == "MS_SCHED":
        return
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    _current = _Heartbeat(heartbeat_path(Path(directory), int(rank)))


def enter(activity: str) -> None:
    """Say what this process does from now on; it counts as moving on."""
    if _current is not None:
        _current.enter(activity)


def tick() -> None:
    """Say that this process has moved on with what it does."""
    if _current is not None:
        _current.tick()


def takes_requests() -> None:
    """Say that this process has something to save, for which SIGTERM asks."""
    if _current is not None:
        _current.saves = True
        _current.write()


def own_path() -> Path | None:
    """Return the file of this process, None where it says nothing."""
    return None if _current is None else _current.path


def wait_while_joining(path: Path, poll_s: float = 0.05) -> None:
    """Return once a rank has found the others, or does not look for them."""
    while (beat := read_beat(path)) is not None and beat.activity in (STARTING, JOINING):
        time.sleep(poll_s)


def heartbeat_path(directory: Path, rank: int) -> Path:
    return directory / f"heartbeat_{rank}.json"


def read_beat(path: Path) -> Beat | None:
    """Return what a rank last said, None before it has said anything."""
    try:
        return Beat(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
