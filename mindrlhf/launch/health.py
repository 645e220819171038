"""Hang detection, from outside the ranks.

Two signs, both on this process's own clock, so that a clock that jumps deceives neither, and in the time that
this process itself has run, so that a machine on which nobody runs for a while does not either:

- A rank that was stopped is in the kernel's state T.
- Rank 0, which drives the run, counts what it gets done. How long one piece of work may take only the user knows.

The beats themselves prove nothing: MindSpore holds the interpreter's lock while it compiles, or waits for other ranks
to join, and no Python thread beats meanwhile.
"""

from collections.abc import Mapping
from pathlib import Path

from mindrlhf.system import processes
from mindrlhf.system.clock import WatchedTime
from mindrlhf.system.heartbeat import Beat, heartbeat_path, read_beat

STOPPED_LIMIT_S = 8.0
_CHECK_INTERVAL_S = 1.0
_STOPPED = "T"


class HealthMonitor:
    """Reads the heartbeats of the ranks in ``directory``.

    Args:
        hang_timeout_s: longest time without progress of rank 0; 0 means no limit.
    """

    def __init__(self, directory: Path, hang_timeout_s: float) -> None:
        self._directory = directory
        self._hang_timeout_s = hang_timeout_s
        self._beats: dict[str, Beat] = {}
        self._stopped: dict[int, float] = {}
        self._last_progress: Beat | None = None
        self._progress_s = 0.0
        self._time = WatchedTime()
        self._next_check_s = 0.0

    def find_hang(self, ranks: Mapping[str, int]) -> tuple[str, str] | None:
        """Return who hangs and how, None when nobody does.

        Args:
            ranks: pids of the running ranks by name.
        """
        now_s = self._time.now_s()
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + _CHECK_INTERVAL_S
        for name, pid in ranks.items():
            self.listening_pid(name, ranks)
            if processes.state(pid) != _STOPPED:
                self._stopped.pop(pid, None)
            elif now_s - self._stopped.setdefault(pid, now_s) >= STOPPED_LIMIT_S:
                return name, f"has been stopped for {now_s - self._stopped[pid]:.0f} s"
        beat = self._beats.get("rank 0")
        if beat is None:
            return None
        if self._last_progress != beat:
            self._last_progress, self._progress_s = beat, now_s
            return None
        elapsed_s = now_s - self._progress_s
        if 0 < self._hang_timeout_s < elapsed_s:
            limit = f"run.hang_timeout_s is {self._hang_timeout_s:g}"
            return "rank 0", f"has made no progress for {elapsed_s:.0f} s ({limit})"
        return None

    def listening_pid(self, name: str, ranks: Mapping[str, int]) -> int | None:
        """Return the pid of a running rank that has begun to beat, and so is prepared for our signals."""
        beat = self._read(name)
        # A file that an earlier process left does not count.
        if beat is None or name not in ranks or beat.pid != ranks[name]:
            return None
        self._beats[name] = beat
        return beat.pid

    def saves(self) -> bool:
        """Return whether rank 0, which listens, has something that SIGTERM would have it save."""
        return self._beats["rank 0"].saves

    def activities(self) -> dict[str, str]:
        """Return what each rank said last, by name."""
        return {name: (self._read(name) or beat).activity for name, beat in self._beats.items()}

    def progress(self) -> str:
        """Return how much rank 0 has done, such as "12 of 128 samples"; "" where that is not counted."""
        beat = self._read("rank 0")
        return beat.progress if beat else ""

    def _read(self, name: str) -> Beat | None:
        return read_beat(heartbeat_path(self._directory, int(name.removeprefix("rank "))))
