"""Whether the ranks of a run still move, as the launcher sees it from outside.

Two signs, both on this process's own clock, so that a clock that jumps deceives neither:

- A rank that has stopped altogether (a stopped process, a deadlock that holds the interpreter lock) beats no more. A
  compiler that holds the lock for minutes does not beat either, but it uses processor time, and a process that waits
  for a disk is in the kernel's state D: neither counts as stopped.
- A run whose ranks wait for each other, or for something that never comes, goes on beating without any progress of
  rank 0, which drives it. How long that may last only the user knows.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.heartbeat import Beat, heartbeat_path, read_beat
from mindrlhf.training import processes

SILENCE_LIMIT_S = 8.0
_CHECK_INTERVAL_S = 1.0
_WAITS_FOR_DISK = "D"
# Less than this in the whole time of silence is no work: the clock of the kernel ticks in hundredths.
_IDLE_CPU_S = 0.05


@dataclass
class _Sign:
    """When something last changed, and the processor time used until then."""

    value: tuple[int, ...]
    time_s: float
    cpu_time_s: float


class HealthMonitor:
    """Reads the heartbeats of the ranks in ``directory``.

    Args:
        hang_timeout_s: longest time without progress of rank 0; 0 means no limit.
    """

    def __init__(self, directory: Path, hang_timeout_s: float) -> None:
        self._directory = directory
        self._hang_timeout_s = hang_timeout_s
        self._beats: dict[str, Beat] = {}
        self._last_beat: dict[str, _Sign] = {}
        self._progress: _Sign | None = None
        self._next_check_s = 0.0

    def find_hang(self, pids: Mapping[str, int]) -> tuple[str, str] | None:
        """Return which of the running ranks hangs and how, None when none does.

        Args:
            pids: running ranks by name.
        """
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + _CHECK_INTERVAL_S
        for name, pid in pids.items():
            if self.listening_pid(name, pids) is not None and self._is_silent(name, pid, now_s):
                return name, f"has not moved for {now_s - self._last_beat[name].time_s:.0f} s"
        return self._find_standstill(now_s)

    def listening_pid(self, name: str, pids: Mapping[str, int]) -> int | None:
        """Return the pid of a running rank that has begun to beat, and so is prepared for our signals."""
        beat = read_beat(heartbeat_path(self._directory, int(name.removeprefix("rank "))))
        # A file that an earlier process left does not count.
        if beat is None or name not in pids or beat.pid != pids[name]:
            return None
        self._beats[name] = beat
        return beat.pid

    def activities(self) -> dict[str, str]:
        """Return what each rank said last, by name."""
        return {name: read.activity for name, beat in self._beats.items() if (read := self._reread(name) or beat)}

    def _reread(self, name: str) -> Beat | None:
        return read_beat(heartbeat_path(self._directory, int(name.removeprefix("rank "))))

    def _is_silent(self, name: str, pid: int, now_s: float) -> bool:
        value = (pid, self._beats[name].num_beats)
        last = self._last_beat.get(name)
        if last is None or last.value != value or processes.state(pid) == _WAITS_FOR_DISK:
            self._last_beat[name] = _Sign(value, now_s, processes.cpu_time_s(pid))
            return False
        if now_s - last.time_s < SILENCE_LIMIT_S:
            return False
        if processes.cpu_time_s(pid) - last.cpu_time_s > _IDLE_CPU_S:
            self._last_beat[name] = _Sign(value, now_s, processes.cpu_time_s(pid))
            return False
        return True

    def _find_standstill(self, now_s: float) -> tuple[str, str] | None:
        beat = self._beats.get("rank 0")
        if beat is None:
            return None
        value = (beat.pid, beat.num_ticks)
        if self._progress is None or self._progress.value != value:
            self._progress = _Sign(value, now_s, 0.0)
        elapsed_s = now_s - self._progress.time_s
        if not 0 < self._hang_timeout_s < elapsed_s:
            return None
        return "rank 0", f"has made no progress for {elapsed_s:.0f} s (run.hang_timeout_s is {self._hang_timeout_s:g})"
