"""How long the thread that samples has worked in a step, and what ranks and servers waited for."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping


class BusyTime:
    """The seconds that a thread has worked, for others to read; a step of the loop begins with ``begin_step``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total_s = 0.0
        self._since_s: float | None = None
        self._begun_s = self._before_s = 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the time of the body, in the thread that works."""
        with self._lock:
            self._since_s = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._total_s += time.perf_counter() - self._since_s
                self._since_s = None

    def begin_step(self) -> None:
        """Count anew for a step of the loop."""
        self._begun_s, self._before_s = time.perf_counter(), self._total()

    def step_s(self) -> float:
        """Return the seconds since the step began, those of a body that is under way included."""
        return self._total() - self._before_s

    def idle_metrics(self, timings: Mapping[str, float]) -> dict[str, float]:
        """Return the shares of the step in which the ranks waited for samples, and in which the thread did nothing.

        Args:
            timings: seconds of the ranks' stages.
        """
        elapsed_s = time.perf_counter() - self._begun_s
        return {
            "async/idle_ranks": timings.get("timing/rollout_wait", 0.0) / timings["timing/all"],
            "async/idle_servers": max(0.0, 1.0 - self.step_s() / elapsed_s),
        }

    def _total(self) -> float:
        with self._lock:
            return self._total_s + (0.0 if self._since_s is None else time.perf_counter() - self._since_s)
