"""The clock by which a pool tells which call a worker is busy with, and since when.

It is a few bytes of memory shared by pool and worker: the worker writes it before each call of user code,
at the cost of a memory write, and the pool reads it when it wakes, and after the worker's death.
"""

import contextlib
import math
import mmap
import os
from collections.abc import Iterator
from time import monotonic  # by name: user code may patch the module
from typing import NamedTuple

# How long a slow import may take before it counts as hanging after all.
IMPORT_ALLOWANCE_S = 120.0

_SIZE_BYTES = 24
_IDLE = math.inf


class Running(NamedTuple):
    """The call a worker is busy with."""

    sequence: int  # the pool's number of the sample
    position: int  # of the verifier in the pool's list
    started_at_s: float  # time.monotonic(), which all processes of a machine share


class CallClock:
    """The shared record of the call under way in one worker. ``fd`` is a memory file that both hold open.

    Each field is one aligned store, and the starting time is the last to be set and the first to be cleared.
    So the time is never read half-written, and a worker killed anywhere leaves a record that is true.
    """

    def __init__(self, fd: int):
        os.ftruncate(fd, _SIZE_BYTES)
        memory = memoryview(mmap.mmap(fd, _SIZE_BYTES))
        self._call = memory[:16].cast("q")
        self._started_at_s = memory[16:].cast("d")

    def begin(self, sequence: int, position: int) -> None:
        self._call[0] = sequence
        self._call[1] = position
        self._started_at_s[0] = monotonic()

    def stop(self) -> None:
        self._started_at_s[0] = _IDLE

    def running(self) -> Running | None:
        started_at_s = self._started_at_s[0]
        return None if started_at_s == _IDLE else Running(self._call[0], self._call[1], started_at_s)

    def last_position(self) -> int:
        """Return the position of the verifier that was called last."""
        return self._call[1]

    def restart(self, allowance_s: float = 0.0) -> None:
        """Let the call under way, if any, begin ``allowance_s`` from now."""
        if self._started_at_s[0] != _IDLE:
            self._started_at_s[0] = monotonic() + allowance_s


_clock: CallClock | None = None
_timeout_s = math.inf


def install(clock: CallClock, timeout_s: float = math.inf) -> None:
    """Make ``clock`` the one that this process's calls are timed by (done once, by a worker)."""
    global _clock, _timeout_s
    _clock, _timeout_s = clock, timeout_s


def remaining_s() -> float:
    """Return what is left of the time limit for the call under way; infinite outside a worker."""
    running = _clock.running() if _clock is not None else None
    return _timeout_s if running is None else max(0.0, running.started_at_s + _timeout_s - monotonic())


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Leave what happens inside, a slow import, out of the time limit of the sample that happens to need it."""
    if _clock is None:
        yield
        return
    _clock.restart(IMPORT_ALLOWANCE_S)
    try:
        yield
    finally:
        _clock.restart()
