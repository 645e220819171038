"""The console table: one aligned line per step."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from mindrlhf.system.terminal import BOLD, DIM, RED, RESET, has_colours, width

PLAIN_WIDTH = 100
HEADER_EVERY = 20
_LEFT = "left"  # no metric: the time that the steps that are left will take
_NUM_TIMED_STEPS = 20


def _number(value: float) -> str:
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.1e}"
    for limit, decimals in ((0.1, 4), (100, 3), (1000, 1)):
        if size < limit:
            return f"{value:.{decimals}f}"
    return f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _whole(value: float) -> str:
    return f"{value:.0f}" if abs(value) < 1e5 else f"{value:.0e}"


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 100 else f"{value:.0f}s"


def _rest(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


@dataclass(frozen=True)
class _Column:
    metric: str
    title: str
    width: int
    render: Callable[[float], str]
    priority: int  # columns with the highest numbers go first when the line is too narrow


# In the order of the table. Columns whose metric a run does not have are left out.
COLUMNS = (
    _Column("reward/mean", "reward", 8, _number, 0),
    _Column("reward/std", "std", 7, _number, 6),
    _Column("reward/groups_without_signal", "no-sig", 6, _percent, 5),
    _Column("response_length/mean", "length", 6, _whole, 3),
    _Column("response_length/cut_fraction", "cut", 4, _percent, 2),
    _Column("loss", "loss", 8, _number, 1),
    _Column("accuracy", "acc", 5, _percent, 4),
    _Column("kl", "kl", 8, _number, 8),
    _Column("entropy", "entropy", 7, _number, 4),
    _Column("grad_norm", "grad", 7, _number, 3),
    _Column("lr", "lr", 7, _number, 10),
    _Column("rollout_diff/mean_abs", "diff", 7, _number, 0),
    _Column("e2e_tps", "tok/s", 6, _whole, 7),
    _Column("timing/all", "time", 7, _seconds, 2),
    _Column(_LEFT, "left", 6, _rest, 4),
)


class ConsoleSink:
    """Print each step as one line under a header that is repeated every 20 lines.

    The columns are those whose metrics the run has, less the least important ones where the line would be wider than
    the terminal, or than COLUMNS (100 characters when there is neither). Held-out accuracy and loss get a line of their
    own. Colour goes to terminals only, unless NO_COLOR is set; the text is ASCII.
    """

    def __init__(
        self, stream: TextIO | None = None, *, num_steps: int | None = None, accuracy: str = "held-out accuracy"
    ) -> None:
        """Print to ``stream`` (standard output when None), as "step / num_steps" when the total is known.

        ``accuracy`` is what the run calls the metric `eval/accuracy`.
        """
        self._accuracy = accuracy
        self._stream = sys.stdout if stream is None else stream
        self._styled = has_colours(self._stream)
        self._ends_s: deque[tuple[int, float]] = deque(maxlen=_NUM_TIMED_STEPS)  # the last steps, and their ends
        self._width = width(self._stream, PLAIN_WIDTH)
        self._num_steps = num_steps
        self._seen = {_LEFT} if num_steps else set()
        self._columns: list[_Column] = []
        self._lines_since_header = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if any(column.metric in metrics for column in COLUMNS):
            self._ends_s.append((step, time.monotonic()))
            self._print_step(step, {**metrics, _LEFT: self._left_s(step)})
        if "eval/accuracy" in metrics or "eval/loss" in metrics:
            self._print_evaluation(step, metrics)
        self._stream.flush()

    def close(self) -> None:
        pass  # the stream belongs to the caller

    def _print_step(self, step: int, metrics: Mapping[str, float]) -> None:
        new = {column.metric for column in COLUMNS if column.metric in metrics} - self._seen - {_LEFT}
        is_headed = bool(new) or self._lines_since_header >= HEADER_EVERY
        if is_headed:
            self._seen |= new
            self._columns = self._fitting_columns()
            self._print_header()
        cells = [self._step_label(step).rjust(self._step_width())]
        for column in self._columns:
            value = metrics.get(column.metric)
            text = "-" if value is None else self._cell(column, value)
            cells.append(self._coloured(text, value, column.width))
        print("  ".join(cells), file=self._stream)
        self._lines_since_header += 1

    def _left_s(self, step: int) -> float | None:
        """Return the seconds that the steps that are left will take, by those before; None where that is not known."""
        if self._num_steps is None or len(self._ends_s) < 2:  # the first step compiles
            return None
        (first, start_s), (last, end_s) = self._ends_s[0], self._ends_s[-1]
        return (self._num_steps - step) * (end_s - start_s) / (last - first)

    def _print_header(self) -> None:
        titles = ["step".rjust(self._step_width())] + [column.title.rjust(column.width) for column in self._columns]
        header = "  ".join(titles)
        print(f"{BOLD}{header}{RESET}" if self._styled else header, file=self._stream)
        self._lines_since_header = 0

    def _print_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        line = self._step_label(step).rjust(self._step_width())
        if "eval/accuracy" in metrics:
            line += f"  {self._accuracy} {metrics['eval/accuracy']:.1%}"
        if "eval/loss" in metrics:
            line += f"  held-out loss {_number(metrics['eval/loss'])}"
        if {"eval/accuracy_low", "eval/accuracy_high"} <= metrics.keys():
            line += f" (95% interval {metrics['eval/accuracy_low']:.1%} to {metrics['eval/accuracy_high']:.1%})"
        if "eval/unscored" in metrics:
            line += f"; {metrics['eval/unscored']:.0f} of {metrics['eval/samples']:.0f} samples not scored"
        print(f"{BOLD}{line}{RESET}" if self._styled else line, file=self._stream)

    def _fitting_columns(self) -> list[_Column]:
        columns = [column for column in COLUMNS if column.metric in self._seen]
        while self._step_width() + sum(column.width + 2 for column in columns) > self._width and len(columns) > 1:
            columns.remove(max(columns, key=lambda column: column.priority))
        return columns

    def _cell(self, column: _Column, value: float) -> str:
        return column.render(value) if math.isfinite(value) else str(float(value))

    def _coloured(self, text: str, value: float | None, width: int) -> str:
        padded = text.rjust(width)
        if not self._styled or (value is not None and math.isfinite(value)):
            return padded
        return f"{DIM if value is None else RED}{padded}{RESET}"

    def _step_label(self, step: int) -> str:
        return str(step) if self._num_steps is None else f"{step}/{self._num_steps}"

    def _step_width(self) -> int:
        return 6 if self._num_steps is None else max(6, 2 * len(str(self._num_steps)) + 1)
