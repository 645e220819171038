"""Time as one process may count it that judges others by what they do in it."""

import time

# Longer gaps between two looks are none of the watched processes' doing.
_LONGEST_GAP_S = 2.0


class WatchedTime:
    """Seconds in which this process has looked on, of its own monotonic clock.

    On a machine that is overloaded, or was suspended, nobody runs for a while: neither the watched processes, which so
    seem to hang, nor the one that watches. Of such a gap only the first two seconds count.
    """

    def __init__(self) -> None:
        self._total_s = 0.0
        self._last_s = time.monotonic()

    def now_s(self) -> float:
        """Return the seconds counted so far; call it every second or so."""
        now_s = time.monotonic()
        self._total_s += min(now_s - self._last_s, _LONGEST_GAP_S)
        self._last_s = now_s
        return self._total_s
