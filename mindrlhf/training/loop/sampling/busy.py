"""How long a thread has worked, as the others see it."""

import contextlib
import threading
import time
from collections.abc import Iterator


class BusyTime:
    """The seconds that a thread has worked, for others to read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total_s = 0.0
        self._since_s: float | None = None

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

    def total_s(self) -> float:
        """Return the seconds so far, those of a body that is under way included."""
        with self._lock:
            return self._total_s + (0.0 if self._since_s is None else time.perf_counter() - self._since_s)
