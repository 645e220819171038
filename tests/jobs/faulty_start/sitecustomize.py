"""Imported by Python processes with this directory on PYTHONPATH: bad clock, slow checkpoints, rounding, a way out."""

import os
import signal
import sys
import time
from pathlib import Path

_SHIFTS_S = (0, 3 * 3600, -5 * 3600)  # one after the other, two seconds each
_clock = time.time


def _jumping_clock() -> float:
    return _clock() + _SHIFTS_S[int(time.monotonic()) // 2 % len(_SHIFTS_S)]


if directory := os.environ.get("MINDRLHF_TEST_CLOCK_DIR"):
    time.time = _jumping_clock
    time.time_ns = lambda: int(_jumping_clock() * 1e9)
    (Path(directory) / str(os.getpid())).touch()

if seconds := os.environ.get("MINDRLHF_TEST_SLOW_CHECKPOINTS_S"):
    _rename = os.rename

    def _slow_rename(source, *others, **options) -> None:
        # A checkpoint that is written stays without its name for this long.
        if str(source).endswith(".partial"):
            time.sleep(float(seconds))
        _rename(source, *others, **options)

    os.rename = _slow_rename

if os.environ.get("MINDRLHF_TEST_ROUND_BY_ROWS"):
    import row_rounding

    row_rounding.install()

signal.signal(signal.SIGRTMIN, lambda *_: sys.exit(7))
