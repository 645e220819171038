"""The report of a failed run: which process failed, when, how, its last lines, and how to go on."""

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Container, Mapping
from pathlib import Path

from mindrlhf.errors import STOPPED, UserError
from mindrlhf.launch.logs import HARMLESS_LINES
from mindrlhf.launch.processes import SCHEDULER, UNNAMED
from mindrlhf.system.files import last_lines
from mindrlhf.system.terminal import visible

_NUM_LOG_LINES = 6
_LOG_NAMES = {SCHEDULER: "scheduler.log", UNNAMED: "worker_*.log"}


def failure_report(
    name: str,
    what: str,
    elapsed_s: float,
    activities: Mapping[str, str],
    log_path: Path,
    advice: str,
    *,
    shows_log: bool,
    shown: Container[str] = (),
) -> str:
    """Return the report of a failed run.

    Args:
        name: the process that failed first, such as "rank 1".
        what: how, such as "was killed by SIGKILL".
        activities: what each rank did last, by name.
        shows_log: quote the end of the log, without the lines of it that were ``shown`` before.
        advice: how to go on; may be empty.
    """
    lines = [f"{name} {what} at {time.strftime('%H:%M:%S')}, after {elapsed_s:.0f} s; its log: {log_path}"]
    lines += [f"  {rank} was in: {activity}" for rank, activity in sorted(activities.items())]

    def is_news(line: str) -> bool:
        return not HARMLESS_LINES.search(line) and line not in shown

    if shows_log and (tail := last_lines(log_path, _NUM_LOG_LINES, is_news)):
        lines += ["  the log ends:", *(f"    {line}" for line in tail)]
    with contextlib.suppress(OSError):
        if not shutil.disk_usage(log_path.parent).free:
            lines.append(f"  the disk of {log_path.parent} is full: make room")
    if advice:
        lines.append(f"  {advice}")
    return "\n".join(lines)


def describe_end(returncode: int) -> str:
    """Return how a process ended, in words."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    hint = " (kill -9, or the kernel when memory ran out)" if returncode == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-returncode).name}{hint}"


def exit_code(returncode: int) -> int:
    """Return the exit code of a shell for a process that ended so."""
    return returncode if returncode >= 0 else 128 - returncode


def is_worth_a_restart(code: int) -> bool:
    """Return False for exit codes that a restart cannot improve: those of a mistake or an interrupt."""
    stopped = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return code not in {0, UserError.exit_code, STOPPED, *stopped}


def log_name(name: str) -> str:
    return _LOG_NAMES.get(name) or f"{name.replace('rank ', 'worker_')}.log"


def say(message: str) -> None:
    print(f"mindrlhf: {visible(message)}", file=sys.stderr, flush=True)
