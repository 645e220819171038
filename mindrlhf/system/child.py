"""A child process: started in one way, watched, and killed with all that it has started."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mindrlhf.system.files import last_lines
from mindrlhf.system.processes import MARKER, STARTER_VARIABLE, kill_marked, kill_tree

PIPE = subprocess.PIPE
_NUM_LOG_LINES_SHOWN = 3


def module_words(module: str, *arguments: object, python: str = "") -> list[str]:
    """Return the command line that calls ``main`` of a module of this package, and finds nothing in the working
    directory; another interpreter, ``python``, finds the package behind its own packages."""
    found = f"sys.path.append({str(Path(__file__).parents[2])!r}); " if python else ""
    code = f"import sys; {found}from {module} import main; sys.exit(main())"
    return [python or sys.executable, "-P", "-c", code, *map(str, arguments)]


def inherited(names: Sequence[str]) -> dict[str, str]:
    """Return those variables of this process's environment."""
    return {name: os.environ[name] for name in names if name in os.environ}


class Child:
    """A running program in a session of its own, so that an interrupt from the keyboard does not reach it.

    A child that calls ``processes.end_with_starter`` ends with the thread that started it, however that ends.

    Args:
        words: its command line.
        environment: its whole environment; None means this process's.
        directory: it works in; None means this process's.
        output: where standard output and error go: a log file to append to, a descriptor, or ``PIPE``; None is nowhere.
        error: where standard error goes, if elsewhere.
        input: ``PIPE``, or None for none.
        descriptors: it inherits.
        mark: unique text that it and all it starts have in their environment, by which ``kill`` finds what has left
            its tree; "" for none.
        prepare: called in the child before the program; only where this process has no other threads.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
        output: Path | int | None = None,
        error: int | None = None,
        input: int | None = None,
        descriptors: Sequence[int] = (),
        mark: str = "",
        prepare: Callable[[], None] | None = None,
    ):
        self._log = output if isinstance(output, Path) else None
        self._mark = mark
        self._is_killed = False
        environment = {**(os.environ if environment is None else environment), STARTER_VARIABLE: str(os.getpid())}
        if mark:
            environment[MARKER] = mark
        stream: Any = subprocess.DEVNULL if output is None else output
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            stream = self._log.open("ab")
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL if input is None else input,
                stdout=stream,
                stderr=(subprocess.STDOUT if output is not None else stream) if error is None else error,
                pass_fds=descriptors,
                env=environment,
                cwd=directory,
                start_new_session=True,
                preexec_fn=prepare,
            )
        finally:
            if self._log is not None:
                stream.close()

    @property
    def pid(self) -> int:
        """Its process id, which is also the number of its session."""
        return self._process.pid

    @property
    def input(self) -> IO[bytes]:
        return self._process.stdin

    @property
    def output(self) -> IO[bytes]:
        return self._process.stdout

    @property
    def error(self) -> IO[bytes]:
        return self._process.stderr

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code when it has ended; None if it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def has_ended(self) -> bool:
        """Return whether it has ended, without reaping it: its number is still its own."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # someone else has reaped it
            return True

    def kill(self) -> int:
        """End it with all it has started; return the exit code. Calling it again does nothing."""
        if not self._is_killed:
            self._is_killed = True
            if self._process.returncode is None:  # once it is reaped, its number may belong to others
                kill_tree(self.pid)
            with contextlib.suppress(ProcessLookupError):  # orphans too, of its session
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            if self._mark:
                kill_marked(MARKER, self._mark)
        return self._process.returncode

    def ending(self) -> str:
        """Return how it ended, as ``exit code 3`` or ``signal SIGSEGV``; empty while it runs."""
        code = self.poll()
        return "" if code is None else describe_ending(code)

    def last_lines(self) -> str:
        """Return the end of its log, as the end of a sentence."""
        lines = [line.strip() for line in last_lines(self._log, _NUM_LOG_LINES_SHOWN)]
        return f"; log {self._log} ends: {' | '.join(lines) or '(empty)'}"


def describe_ending(code: int) -> str:
    """Return how a process ended, from its exit code as ``subprocess`` has it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
