"""Hang detection, from outside the ranks.

Three signs, all on this process's own clock, so that a clock that jumps deceives none of them, and in the time that
this process itself has run, so that a machine on which nobody runs for a while does not either:

- A rank that was stopped is in the kernel's state T.
- Where the processor does all the work, a run that neither uses processor time nor waits for a processor does none:
  its ranks wait for each other (for longer while they join, which MindSpore does by asking and sleeping). A process
  that waits for a disk (state D), verifiers that wait for a service and samples that are waited for do not count: these
  have limits of their own. So has a rollout server that owes an answer, and its limit comes first.
- Anywhere, rank 0, which drives the run, counts what it gets done. How long one piece of work may take only the user
  knows.

The beats themselves prove nothing: MindSpore holds the interpreter's lock while it compiles, or waits for other ranks
to join, and no Python thread beats meanwhile.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mindrlhf.launch.peers import ALONE, Peers
from mindrlhf.system import heartbeat, processes
from mindrlhf.system.clock import WatchedTime
from mindrlhf.system.heartbeat import Beat, heartbeat_path, read_beat
from mindrlhf.system.idle import Activity, IdleWatch

STILLNESS_LIMIT_S = 8.0
# Rank 0 has this long to notice a server that has done nothing for `rollout.stall_timeout_s`, and to begin another.
SERVER_NOTICE_S = 3.0
# MindSpore's processes look for each other every 3 s, sleep in between, and have several such talks one after another.
JOINING_LIMIT_S = 60.0
# To a signal Python reacts at once, but not while MindSpore joins or compiles.
NOTICE_LIMIT_S = 15.0
_CHECK_INTERVAL_S = 1.0
_STOPPED = "T"
# Heartbeats, and the threads by which MindSpore's ranks stay in touch, use less than this share of a core each.
_IDLE_SHARE_PER_PROCESS = 0.01
_WAITS_FOR_SAMPLES = (": rollout", ": rollout_wait", ": evaluation")


def stillness_limit_s(stall_timeout_s: float) -> float:
    """Return for how long a run may do nothing whose rollout servers may do nothing for ``stall_timeout_s``: a server
    that is stuck is noticed by rank 0, which replaces it, before the launcher takes the run for stuck and ends it."""
    return max(STILLNESS_LIMIT_S, stall_timeout_s + SERVER_NOTICE_S)


class HealthMonitor:
    """Reads the heartbeats of the ranks in ``directory``.

    Args:
        hang_timeout_s: longest time without progress of rank 0; 0 means no limit.
        still_limit_s: longest time in which no process does anything, where all work takes processor time.
        computes_on_cpu: whether it does.
        peers: the run's other nodes: node 0 hears from them what their processes do.
    """

    def __init__(
        self,
        directory: Path,
        hang_timeout_s: float,
        still_limit_s: float = STILLNESS_LIMIT_S,
        *,
        computes_on_cpu: bool,
        peers: Peers = ALONE,
    ) -> None:
        self._directory = directory
        self._still_limit_s = still_limit_s
        self._hang_timeout_s = hang_timeout_s
        self._computes_on_cpu = computes_on_cpu
        self._peers = peers
        self._beats: dict[str, Beat] = {}
        self._stopped: dict[int, float] = {}
        self._last_progress: Beat | None = None
        self._progress_s = 0.0
        self._first_step: str | None = None  # that rank 0 was first seen in
        self._asked: tuple[int, float] | None = None  # how much it had done when it was sent a signal, and when
        self._idle = IdleWatch()
        self._time = WatchedTime()
        self._next_check_s = 0.0

    def find_hang(self, ranks: Mapping[str, int], list_pids: Callable[[], Collection[int]]) -> tuple[str, str] | None:
        """Return who hangs and how, None when nobody does.

        Args:
            ranks: pids of the running ranks by name.
            list_pids: returns the pids of all running processes of the run.
        """
        now_s = self._time.now_s()
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + _CHECK_INTERVAL_S
        if self._computes_on_cpu and self._peers.node > 0:
            pids = list_pids()
            self._peers.note_activity(Activity.of(pids), len(pids))
        for name, pid in ranks.items():
            self.listening_pid(name, ranks)
            if processes.state(pid) != _STOPPED:
                self._stopped.pop(pid, None)
            elif now_s - self._stopped.setdefault(pid, now_s) >= STILLNESS_LIMIT_S:
                return name, f"has been stopped for {now_s - self._stopped[pid]:.0f} s"
        beat = self._beats.get("rank 0")
        if beat is None:
            return None
        if self._first_step is None and beat.activity.startswith("step "):
            self._first_step = _step(beat)
        if self._last_progress != beat:
            self._last_progress, self._progress_s = beat, now_s
            self._idle.restart(now_s)
            return None
        elapsed_s = now_s - self._progress_s
        if 0 < self._hang_timeout_s < elapsed_s:
            limit = f"run.hang_timeout_s is {self._hang_timeout_s:g}"
            return "rank 0", f"has made no progress for {elapsed_s:.0f} s ({limit})"
        if self._computes_on_cpu and self._is_still(beat, list_pids(), now_s):
            idle_s = self._idle.idle_s(now_s)
            return "rank 0", f"waits: no process of the run has done anything for {idle_s:.0f} s"
        return None

    def expect_notice(self) -> None:
        """Note that rank 0 is sent a signal; its handler lets the heartbeat tick."""
        beat = self._read("rank 0")
        self._asked = (beat.num_ticks if beat else 0), self._time.now_s()

    def is_deaf_before_first_step(self) -> bool:
        """Return True if rank 0 has ignored ``expect_notice`` for too long before the end of its first step.

        What it holds in memory is then what it began with: nothing is lost if it is killed.
        """
        beat = self._read("rank 0")
        if self._asked is None or beat is None or (self._first_step is not None and _step(beat) != self._first_step):
            return False
        num_ticks, since_s = self._asked
        return beat.num_ticks == num_ticks and self._time.now_s() - since_s > NOTICE_LIMIT_S

    def listening_pid(self, name: str, ranks: Mapping[str, int]) -> int | None:
        """Return the pid of a running rank that has begun to beat, and so is prepared for our signals."""
        beat = self._read(name)
        # A file that an earlier process left does not count.
        if beat is None or name not in ranks or beat.pid != ranks[name]:
            return None
        self._beats[name] = beat
        return beat.pid

    def activities(self) -> dict[str, str]:
        """Return what each rank said last, by name."""
        return {name: (self._read(name) or beat).activity for name, beat in self._beats.items()}

    def progress(self) -> str:
        """Return how much rank 0 has done, such as "12 of 128 samples"; "" where that is not counted."""
        beat = self._read("rank 0")
        return beat.progress if beat else ""

    def _read(self, name: str) -> Beat | None:
        return read_beat(heartbeat_path(self._directory, int(name.removeprefix("rank "))))

    def _is_still(self, beat: Beat, pids: Collection[int], now_s: float) -> bool:
        if beat.activity.endswith(_WAITS_FOR_SAMPLES):
            self._idle.restart(now_s)
            return False
        limit_s = JOINING_LIMIT_S if beat.activity == heartbeat.JOINING else self._still_limit_s
        elsewhere, num_elsewhere = self._peers.activity()
        idle_cpu_s = _IDLE_SHARE_PER_PROCESS * (len(pids) + num_elsewhere) * self._still_limit_s
        return self._idle.has_idled(Activity.of(pids) + elsewhere, now_s, limit_s, idle_cpu_s)


def _step(beat: Beat) -> str:
    return beat.activity.split(":")[0]
