"""Detects idle processes from their CPU time in /proc."""

from collections.abc import Collection
from dataclasses import dataclass

from mindrlhf.system import processes

_RUNNABLE, _WAITS_FOR_DISK = "R", "D"


@dataclass(frozen=True)
class Activity:
    """CPU time and thread states of a group of processes at one moment."""

    cpu_time_s: float  # used so far, by all
    is_runnable: bool = False  # a thread runs, or waits for a processor
    waits_for_disk: bool = False

    @classmethod
    def of(cls, pids: Collection[int]) -> "Activity":
        """Look at some processes; those that have ended do nothing."""
        states = set().union(*map(processes.thread_states, pids))
        cpu_time_s = sum(map(processes.cpu_time_s, pids))
        return cls(cpu_time_s, _RUNNABLE in states, _WAITS_FOR_DISK in states)


class IdleWatch:
    """Tells a group of processes that is stuck from one that works, or would if it were given a processor.

    Processes do nothing when they have used next to no processor time during the whole limit, did not wait for a disk,
    and were asleep in most looks. The last sign is for busy machines: of a processor that hundreds share, one that
    works gets next to nothing too, but it is runnable (state R of proc(5)) whenever one looks. One that sleeps is
    seen runnable now and then, since the threads by which it keeps in touch have to wait for the processor as well.
    The states are what every kernel shows; the time in the queue (schedstat) many do not.
    """

    def __init__(self) -> None:
        self._cpu_time_s: float | None = None
        self._since_s = 0.0
        self._num_looks = self._num_runnable = 0

    def has_idled(self, activity: Activity, now_s: float, limit_s: float, idle_cpu_s: float) -> bool:
        """Return whether they have done nothing for ``limit_s``; to be called every second or so.

        Args:
            activity: what they do now.
            now_s: the time, on a clock that stands still while this process does not run (``WatchedTime``).
            limit_s: how long they may do nothing.
            idle_cpu_s: processor time that processes which do nothing use in that time all the same.
        """
        used_s, before_s = activity.cpu_time_s, self._cpu_time_s
        # Processor time falls when one of them ends.
        if before_s is None or activity.waits_for_disk or abs(used_s - before_s) > idle_cpu_s:
            self._begin(used_s, now_s)
            return False
        self._num_looks += 1
        self._num_runnable += activity.is_runnable
        if self.idle_s(now_s) < limit_s:
            return False
        if 2 * self._num_runnable >= self._num_looks:
            self._begin(used_s, now_s)
            return False
        return True

    def idle_s(self, now_s: float) -> float:
        """Return for how long they have done nothing."""
        return now_s - self._since_s

    def _begin(self, cpu_time_s: float, now_s: float) -> None:
        self._cpu_time_s, self._since_s = cpu_time_s, now_s
        self._num_looks = self._num_runnable = 0
