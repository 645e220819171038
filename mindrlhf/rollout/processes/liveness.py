"""Stall detection of a server that owes an answer."""

from collections.abc import Callable

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
        look: returns what they do; None where nothing is known since the last look.
        limit_s: how long they may use none.
    """

    def __init__(self, look: Callable[[], Activity | None], limit_s: float):
        self._look = look
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
        activity = self._look()
        return activity is not None and self._idle.has_idled(
            activity, now_s, self._limit_s, _IDLE_SHARE * self._limit_s
        )
