"""Following the log files of the ranks and choosing which lines the terminal shows; the files keep everything."""

import re
from collections import deque
from pathlib import Path
from typing import TextIO

from mindrlhf.launch.stages import StageLines
from mindrlhf.system.terminal import BOLD, GREEN, RED, RESET, YELLOW, has_colours

# What MindSpore and MindFormers write on every healthy start on CPU or Ascend.
HARMLESS_LINES = re.compile(
    "|".join(
        (
            r"^\[(DEBUG|INFO)\] [A-Z]",
            r"^\[WARNING\] .*\[mindspore/ccsrc/(include/)?cluster/(rpc|topology)/",
            r"^\[WARNING\] .*\[mindspore/ccsrc/.*collective",
            r"^\[WARNING\] .*(/thread_bind_core\.py:|set_cpu_affinity is not enabled)",
            r"^\[WARNING\] .*The number of actor threads is only",
            r"^\[WARNING\] .*Skip to bind thread core",
            # Kept graphs: MindSpore cannot know that what they were made of was compared.
            r"^\[WARNING\] .*\[mindspore/ccsrc/frontend/jit/ps/compile_cache_manager\.cc",
            r"^\[WARNING\] .*GetCompileCacheResource\] Check the consistency of dependency files hash failed",
            r"^\[WARNING\] .*CommManager instance for CPU not found",
            r"^\[WARNING\] .*deprecated",
            r"^\[WARNING\] .*Distributed job is spawned",
            r"^\[WARNING\] .*\[mindspore/profiler/(schedule|profiler_action_controller)\.py",
            r"^\[\d+\] (Start parsing profiling data|Parsing): ",
            r"^\S+ \S+ - mindformers\S* - (DEBUG|INFO) - ",
            r"DeprecationWarning|FutureWarning|UserWarning",
            r"^\s+warnings\.warn\(",
            r"^None of PyTorch, TensorFlow",
            r"^Start (scheduler|worker) process with|^Start scheduler process, log file",
        )
    )
)
_NEWS_OF_OTHER_RANKS = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|(Error|Exception|error):")
_TRACEBACK_START = re.compile(r"^Traceback \(most recent call last\)")
_COLOURS = (
    (re.compile(r"^ *step  +[a-z]"), BOLD),
    (re.compile(r"\b(error|ERROR|CRITICAL)\b|\bnan\b|^Traceback |: worse$"), RED),
    (re.compile(r"\b(warning|WARNING)\b"), YELLOW),
    (re.compile(r": better$"), GREEN),
    (re.compile(r"held-out accuracy"), BOLD),
)
_TRACEBACK_MAX_LINES = 60
_NUM_REMEMBERED_LINES = 500


def coloured(line: str) -> str:
    """Return a line as a terminal shows it: heads of tables bold, warnings yellow, errors red."""
    for pattern, start in _COLOURS:
        if pattern.search(line):
            return f"{start}{line}{RESET}"
    return line


class LogFollower:
    """Copies new lines of each rank's log to the terminal.

    Rank 0 is shown plainly. Of the others only warnings, errors and tracebacks are shown, after ``[rank N]``, and
    not again when another rank has just said the same. ``stages`` adds lines on what rank 0 does.
    """

    def __init__(self, log_paths: dict[int, Path], out: TextIO, stages: StageLines | None = None) -> None:
        self._style = coloured if has_colours(out) else str
        self._tails = {rank: _Tail(path) for rank, path in log_paths.items()}
        self._out = out
        self._traceback_lines_left = dict.fromkeys(log_paths, 0)
        self._stages = stages
        self._has_news = False
        self.shown: deque[str] = deque(maxlen=_NUM_REMEMBERED_LINES)  # the last lines, without the ranks before them

    def shows_all_of(self, rank: str) -> bool:
        """Return True if every line of a rank ("rank 0") is shown, not only its news."""
        return rank == "rank 0" and 0 in self._tails

    def poll(self, *, final: bool = False, activity: str | None = None, done: str = "") -> None:
        """Show what was written since the last call; ``final`` shows an unfinished last line too.

        Args:
            activity, done: what rank 0 said last that it does, and how much of it is done, for the lines about stages;
                None leaves them out.
        """
        self._has_news = False
        for rank, tail in self._tails.items():
            for line in tail.new_lines(final=final):
                self._show(rank, line)
        if self._stages is not None and activity is not None:
            self._stages.update(activity, has_news=self._has_news, done=done)
        elif self._stages is not None:
            self._stages.clear()
        self._out.flush()

    def _show(self, rank: int, line: str) -> None:
        if HARMLESS_LINES.search(line):
            self._traceback_lines_left[rank] = 0
            return
        if rank == 0:
            self.shown.append(line)
            self._write(line)
        elif self._is_news(rank, line) and line not in self.shown:
            self.shown.append(line)
            self._write(f"[rank {rank}] {line}")

    def _write(self, line: str) -> None:
        self._has_news = True
        if self._stages is not None:
            self._stages.clear()
        self._out.write(f"{self._style(line)}\n")

    def _is_news(self, rank: int, line: str) -> bool:
        if _TRACEBACK_START.search(line):
            self._traceback_lines_left[rank] = _TRACEBACK_MAX_LINES
        if self._traceback_lines_left[rank] > 0:
            self._traceback_lines_left[rank] -= 1
            return True
        return bool(_NEWS_OF_OTHER_RANKS.search(line))


class _Tail:
    """The lines appended to a file since the last look; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = 0
        self._unfinished = b""

    def new_lines(self, *, final: bool) -> list[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset_bytes += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if final and self._unfinished:
            lines.append(self._unfinished)
            self._unfinished = b""
        # A progress bar redraws its line after each carriage return: only its last state is worth a line.
        return [line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2] for line in lines]
