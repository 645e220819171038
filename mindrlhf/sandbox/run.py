"""Runs a Python program that nobody trusts, under limits, and kills all it has started.

The program is forked from a warm launcher (``launcher``), which says what layers keep it in: namespaces, seccomp,
Landlock, a user of its own, limits, and a watch over the memory it really holds. ``docs/security.md`` has the table.
"""

import contextlib
import json
import os
import random
import select
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mindrlhf.sandbox import server, time_limit
from mindrlhf.sandbox.server import input_file
from mindrlhf.system.processes import kill_tree

MAX_ERROR_CHARS = 2000
READ_SIZE_BYTES = 1 << 16
# How long the end of a program may take once it is asked for, before it is hunted down from here.
END_TIMEOUT_S = 2.0
# A range of user ids that no distribution hands out.
FIRST_USER_ID, NUM_USER_IDS = 1_900_000_000, 50_000_000


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a program. ``memory_bytes`` is the address space of each process, interpreter included, and what
    all its processes, shared memory and files hold together."""

    time_s: float = 5.0  # wall time, start of the program included
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20  # of standard output and standard error together
    disk_bytes: int = 16 << 20  # of its memory disk, and of any one file
    num_processes: int = 16  # threads count


@dataclass(frozen=True)
class SandboxRun:
    """End of a program.

    ``ending`` is ``exit code 0``, ``signal SIGKILL``, or the limit passed: ``time limit``, ``output limit``,
    ``memory limit``, ``disk limit``.
    """

    stdout: str
    stderr: str  # the end of it
    ending: str

    @property
    def succeeded(self) -> bool:
        """True if the program ended by itself, with exit code 0."""
        return self.ending == "exit code 0"


@dataclass(frozen=True)
class LaunchRequest:
    """Request to the launcher for one program."""

    files: dict[str, str]
    main: str
    main_number: int | None  # of the launcher's compiled main files, where ``main`` is one and no file
    user_id: int
    memory_bytes: int
    disk_bytes: int
    num_processes: int
    cpu_s: int


def run_python(source: str, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxRun:
    return run_files({"main.py": source}, "main.py", stdin, limits)


def run_files(
    files: Mapping[str, str],
    main: str,
    stdin: str = "",
    limits: SandboxLimits | None = None,
) -> SandboxRun:
    """Run the script ``main`` of ``files`` (text by plain file name), in a directory that holds them.

    The interpreter is this one's base interpreter, with its standard library; packages of a virtual environment
    are not there. Returns within ``limits.time_s`` and the little it takes to end the processes.

    Args:
        files: what lies in the working directory.
        main: the name of the script.
        stdin: what it reads.
        limits: what it may use.

    Raises:
        OSError: no process could be started.
    """
    with Program(files, main, limits or SandboxLimits(), stdin=stdin) as program:
        return program.collect()


class Program:
    """A running program of the sandbox; used with ``with``, which ends all it has started.

    Args:
        link: a socket that the program finds as descriptor 3.
        is_main_ours: the script is a part of this package, the same every time; the launcher keeps its compiled form.
            All that goes into one program goes by the others, or by ``stdin``.
        captures: outputs are kept, not thrown away.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        main: str,
        limits: SandboxLimits,
        *,
        stdin: str = "",
        link: socket.socket | None = None,
        is_main_ours: bool = False,
        captures: bool = True,
    ) -> None:
        """Start it; the first arguments are those of ``run_files``."""
        self._limits = limits
        with time_limit.uncounted():  # of the sample that happens to be the first
            self._server = server.shared_server()
        self.deadline_s = time.monotonic() + limits.time_s
        self._has_ended = False
        self._told: dict[str, Any] = {}
        self._unread = b""
        files = dict(files)
        request = LaunchRequest(
            files=files,
            main=main,
            main_number=self._server.number_of_main(files.pop(main)) if is_main_ours else None,
            user_id=FIRST_USER_ID + random.SystemRandom().randrange(NUM_USER_IDS),
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.disk_bytes,
            num_processes=limits.num_processes,
            cpu_s=int(limits.time_s) + 1,
        )
        self._outputs: dict[int, bytearray] = {}
        self._channel, theirs = socket.socketpair()
        handed = []
        try:
            handed.append(input_file(stdin))
            for _ in range(2):
                if captures:
                    reading, writing = os.pipe()
                    os.set_blocking(reading, False)
                    self._outputs[reading] = bytearray()
                    handed.append(writing)
                else:
                    handed.append(os.open(os.devnull, os.O_WRONLY))
            links = [link.fileno()] if link is not None else []
            self._server.launch([theirs.fileno(), *handed, *links])
            theirs.close()
            self._channel.sendall(json.dumps(asdict(request)).encode() + b"\n")
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            for fd in handed:
                os.close(fd)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self._close()

    def collect(self) -> SandboxRun:
        """Read both outputs until the program ends, or a limit is passed.

        Raises:
            OSError: the program could not be started.
        """
        ending = ""
        with selectors.DefaultSelector() as selector:
            for fd in (*self._outputs, self._channel.fileno()):
                selector.register(fd, selectors.EVENT_READ)
            while not ending and "ending" not in self._told and "failure" not in self._told:
                for key, _ in selector.select(max(0.0, self.deadline_s - time.monotonic())):
                    is_open = self._hear() if key.fd == self._channel.fileno() else self._read(key.fd)
                    if not is_open:
                        selector.unregister(key.fd)
                        if key.fd == self._channel.fileno():
                            self._told.setdefault("ending", 128 + signal.SIGKILL)
                if sum(map(len, self._outputs.values())) > self._limits.output_bytes:
                    ending = "output limit"
                elif time.monotonic() >= self.deadline_s:
                    ending = "time limit"
        self.end()
        # What was written before the end lies in the pipes still.
        for fd in self._outputs:
            while len(self._outputs[fd]) <= self._limits.output_bytes and self._read(fd) and self._has_more(fd):
                pass
        if sum(map(len, self._outputs.values())) > self._limits.output_bytes:
            ending = ending or "output limit"
        self.check_started()
        texts = [output.decode(errors="replace") for output in self._outputs.values()] or ["", ""]
        return SandboxRun(texts[0], texts[1][-MAX_ERROR_CHARS:], ending or _name_of(self._told.get("ending")))

    def check_started(self) -> None:
        """Raise an OSError if the sandbox could not start the program, as far as is known; all is once it has ended."""
        self.end()
        if "failure" in self._told:
            raise OSError(self._told["failure"])

    def end(self) -> None:
        """Kill whatever still runs of the program, and wait until it is gone."""
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        if "namespaces" not in self._server.layers:
            # The watch waits to be killed together with what is left below it.
            self._hear_until(lambda: "pid" in self._told)
            if "pid" in self._told:
                kill_tree(self._told["pid"])
                shutil.rmtree(self._told["work_dir"], ignore_errors=True)
        if not self._hear_until(lambda: False):
            self._server.close()

    def _hear_until(self, has_enough: Any) -> bool:
        """Listen to the watch until it ends; return whether it has, or what was awaited has come."""
        self._channel.settimeout(END_TIMEOUT_S)
        with contextlib.suppress(TimeoutError):
            while not has_enough():
                if not self._hear():
                    return True
            return True
        return False

    def _hear(self) -> bool:
        """Take in what the watch has to say; return whether it is still there."""
        try:
            chunk = self._channel.recv(READ_SIZE_BYTES)
        except ConnectionError:
            return False
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            # The first word counts: none comes from the program, but a failure may be followed by an ending.
            self._told = json.loads(line) | self._told
        return bool(chunk)

    def _read(self, fd: int) -> bool:
        try:
            chunk = os.read(fd, READ_SIZE_BYTES)
        except BlockingIOError:
            return True
        self._outputs[fd] += chunk
        return bool(chunk)

    def _has_more(self, fd: int) -> bool:
        return bool(select.select([fd], [], [], 0)[0])

    def _close(self) -> None:
        self._channel.close()
        for fd in self._outputs:
            with contextlib.suppress(OSError):
                os.close(fd)


def _name_of(ending: int | str | None) -> str:
    """Return how a program ended, from what the watch said: an exit code as a shell gives it, or a limit."""
    if isinstance(ending, str):
        return ending
    code = 128 + signal.SIGKILL if ending is None else ending
    if code <= 128:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(code - 128).name}"
    return f"exit code {code}"
