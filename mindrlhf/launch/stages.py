"""Progress messages of a run, on the terminal and in logs: each stage as it begins, and a sign of life in long ones."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from mindrlhf.system import heartbeat, progress
from mindrlhf.system.terminal import CLEAR_LINE

# A reader of a log waits no longer for a line. In a stage that takes very long they come less often later on.
SILENCE_LIMIT_S = 8.0
_LATER_LIMIT_S = 60.0
_NUM_EARLY_SIGNS = 40  # more than five minutes
_STEP = "step "  # the steps have lines of their own
_STAGE_WORDS = {
    "reshard_to_infer": "weight sync",
    "rollout_wait": "waiting for samples",
    "old_log_p": "log-probabilities",
}
_AFTER_STEP = re.compile(r"step (\d+): (evaluation|checkpoint)")  # what comes between two steps is timed with the next


class StageLines:
    """Writes a line when rank 0 begins another stage, and when nothing has been written for a while.

    On a terminal the latter is one line, written over each second.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal, self._is_open = out.isatty(), False
        self._start_s = self._since_s = self._last_line_s = time.monotonic()
        self._activity = ""
        self._num_signs = 0

    def update(self, activity: str, *, has_news: bool, done: str = "") -> None:
        """Write what there is to say.

        Args:
            activity: what rank 0 said last that it does, "" before it has said anything.
            done: how much of it, such as "12 of 128 samples".
            has_news: whether somebody else has written a line since the last call.
        """
        now_s = time.monotonic()
        if has_news:
            self._last_line_s, self._num_signs = now_s, 0
        activity = _in_words(activity)
        if activity != self._activity:
            # How a run ended is its last line, unless stopping takes long.
            is_announced = not activity.startswith(_STEP) and activity != heartbeat.STOPPING
            self._activity, self._since_s, self._num_signs = activity, now_s, 0
            if is_announced:
                self._write(activity, now_s)
            return
        limit_s = SILENCE_LIMIT_S if self._num_signs < _NUM_EARLY_SIGNS else _LATER_LIMIT_S
        if now_s - self._last_line_s >= (1.0 if self._is_terminal else limit_s):
            self._num_signs += 1
            details = [done] * bool(done) + [f"for {duration(now_s - self._since_s)}"]
            self._write(f"{activity} ({', '.join(details)})", now_s, stays=not self._is_terminal)

    def clear(self) -> None:
        """Take the line off the terminal that the next would be written over."""
        if self._is_open:
            self._is_open = False
            self._out.write(CLEAR_LINE)

    def _write(self, text: str, now_s: float, stays: bool = True) -> None:
        self.clear()
        self._last_line_s, self._is_open = now_s, not stays
        self._out.write(f"mindrlhf: {duration(now_s - self._start_s):>6}  {text}" + "\n" * stays)
        self._out.flush()


def _in_words(activity: str) -> str:
    """Return what rank 0 does as the lines say it."""
    if activity == heartbeat.STARTING:
        return "loading the trainer"
    if found := _AFTER_STEP.fullmatch(activity):
        num_done, what = int(found[1]) - 1, found[2]
        if what == "checkpoint":
            return f"{_STEP}{num_done}: checkpoint"
        return f"evaluating after step {num_done}" if num_done else "evaluating before training"
    step, colon, stage = activity.partition(": ")
    return f"{step}{colon}{_STAGE_WORDS.get(stage, stage)}" if activity else "starting Python"


def duration(seconds: float) -> str:
    """Return a time as people say it: "8 s", "2 min 5 s", "3 h 10 min"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def signs_of_life(what: str, out: TextIO, limit_s: float = SILENCE_LIMIT_S) -> Iterator[None]:
    """Say on ``out``, while the body takes long, what it does and for how long it has."""
    start_s, is_over = time.monotonic(), threading.Event()

    def say() -> None:
        number = 0
        while not is_over.wait(limit_s if number < _NUM_EARLY_SIGNS else max(limit_s, _LATER_LIMIT_S)):
            number += 1
            with contextlib.suppress(OSError, ValueError):  # whoever read it may have gone
                words = [what, progress.now(), f"for {duration(time.monotonic() - start_s)}"]
                out.write(f"mindrlhf: {', '.join(filter(None, words))}\n")
                out.flush()

    thread = threading.Thread(target=say, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
