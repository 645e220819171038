"""Stall detection of a server that owes an answer."""

from mindrlhf.system import processes
from mindrlhf.system.clock import WatchedTime
from mindrlhf.system.idle import Activity, IdleWatch

_CHECK_INTERVAL_S = 1.0
# Less processor time than this during the whole limit is no work: threads that only look around use as much.
_IDLE_SHARE = 0.005


class StallWatch:
    """Watches a process and its descendants from the moment it is asked something until it answers.

    A working engine uses processor time, or waits for it, on an accelerator too, if only to schedule the next step;
    one that was stopped or is in a deadlock does neither.

    Args:
        limit_s: how long it may use none.
    """

    def __init__(self, pid: int, limit_s: float):
        self._pid = pid
        self._limit_s = limit_s
        self._time = WatchedTime()
        self._idle = IdleWatch()
        self._next_check_s = 0.0

    def is_stalled(self) -> bool:
        """Return whether no work has been done for the whole limit; call it every second or so."""
        now_s = self._time.now_s()
        if now_s < self._next_check_s:
            return False
        self._next_check_s = now_s + _CHECK_INTERVAL_S
        pids = [self._pid, *(status.pid for status in processes.descendants(self._pid))]
        return self._idle.has_idled(Activity.of(pids), now_s, self._limit_s, _IDLE_SHARE * self._limit_s)
