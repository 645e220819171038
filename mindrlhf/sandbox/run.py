"""Runs a Python program that nobody trusts, under limits, and kills all it has started.

On Linux the program sees no network and a read-only file system (``sandbox_launcher`` says how). Where the kernel
or the container refuses namespaces, a warning is printed once, and the limits remain: memory, CPU time, wall time,
processes, output, file sizes.
"""

import contextlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mindrlhf.sandbox import launcher as sandbox_launcher
from mindrlhf.system.processes import kill_tree

MAX_ERROR_CHARS = 2000
READ_SIZE_BYTES = 1 << 16
WAIT_INTERVAL_S = 0.002
# A range of user ids that no distribution hands out.
FIRST_USER_ID, NUM_USER_IDS = 1_900_000_000, 50_000_000

_has_warned = False


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use. ``memory_bytes`` is per process: address space, interpreter included."""

    time_s: float = 5.0  # wall time, start of the interpreter included
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20  # of standard output and standard error together
    disk_bytes: int = 16 << 20  # of its memory disk, and of any one file
    num_processes: int = 16  # threads count


@dataclass(frozen=True)
class SandboxRun:
    """How a program ended. ``ending`` is ``exit code 0``, ``signal SIGKILL``, ``time limit`` or ``output limit``."""

    stdout: str
    stderr: str  # the end of it
    ending: str

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself, with exit code 0."""
        return self.ending == "exit code 0"


@dataclass(frozen=True)
class LaunchSettings:
    """What ``sandbox_launcher`` is told."""

    parent_pid: int
    status_fd: int
    interpreter: str
    base_prefix: str
    interpreter_dir: str
    source_dir: str
    work_dir: str
    stdin_file: str
    main: str
    user_id: int
    memory_bytes: int
    disk_bytes: int
    num_processes: int
    cpu_s: int


def run_python(source: str, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxRun:
    """Run ``source`` as a script; see ``run_files``."""
    return run_files({"main.py": source}, "main.py", stdin, limits)


def run_files(files: Mapping[str, str], main: str, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxRun:
    """Run the script ``main`` of ``files`` (text by plain file name), in a directory that holds them.

    The interpreter is this one's base interpreter, with its standard library; packages of a virtual environment
    are not there. Returns within ``limits.time_s`` and the little it takes to end the processes.

    Raises:
        OSError: no room for the temporary directory, or no process could be started.
    """
    limits = limits or SandboxLimits()
    deadline_s = time.monotonic() + limits.time_s
    with tempfile.TemporaryDirectory(prefix="mindrlhf-sandbox-") as directory:
        root = Path(directory)
        root.chmod(0o755)
        for name in ("source", "work", sandbox_launcher.INTERPRETER_DIR):
            (root / name).mkdir()
        (root / "work").chmod(0o777)  # without namespaces a dropped user must be able to write there
        for name, text in files.items():
            (root / "source" / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        (root / "stdin").write_text(stdin, encoding="utf-8", errors="surrogatepass")
        status_read, status_write = os.pipe()
        try:
            settings = _settings(root, main, status_write, limits)
            process = subprocess.Popen(
                [settings.interpreter, "-I", "-S", "-B", sandbox_launcher.__file__, json.dumps(asdict(settings))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(status_write,),
                start_new_session=True,
            )
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(status_write)
        try:
            return _collect(process, deadline_s, limits)
        finally:
            _end(process)
            _warn_once(status_read)


def _settings(root: Path, main: str, status_fd: int, limits: SandboxLimits) -> LaunchSettings:
    return LaunchSettings(
        parent_pid=os.getpid(),
        status_fd=status_fd,
        interpreter=os.path.realpath(sys.executable),
        base_prefix=os.path.realpath(sys.base_prefix),
        interpreter_dir=str(root / sandbox_launcher.INTERPRETER_DIR),
        source_dir=str(root / "source"),
        work_dir=str(root / "work"),
        stdin_file=str(root / "stdin"),
        main=main,
        user_id=FIRST_USER_ID + random.SystemRandom().randrange(NUM_USER_IDS),
        memory_bytes=limits.memory_bytes,
        disk_bytes=limits.disk_bytes,
        num_processes=limits.num_processes,
        cpu_s=int(limits.time_s) + 1,
    )


def _collect(process: subprocess.Popen, deadline_s: float, limits: SandboxLimits) -> SandboxRun:
    """Read both outputs until the program ends, or a limit is passed."""
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in outputs:
            selector.register(fd, selectors.EVENT_READ)
        ending = ""
        while not ending and selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            for key, _ in ready:
                chunk = os.read(key.fd, READ_SIZE_BYTES)
                outputs[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
            if sum(map(len, outputs.values())) > limits.output_bytes:
                ending = "output limit"
            elif time.monotonic() >= deadline_s:
                ending = "time limit"
    stdout, stderr = (output.decode(errors="replace") for output in outputs.values())
    return SandboxRun(stdout, stderr[-MAX_ERROR_CHARS:], ending or _wait(process, deadline_s))


def _wait(process: subprocess.Popen, deadline_s: float) -> str:
    """Wait for a program that has closed its outputs."""
    while process.poll() is None:
        if time.monotonic() >= deadline_s:
            return "time limit"
        time.sleep(WAIT_INTERVAL_S)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if code <= 128:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def _end(process: subprocess.Popen) -> None:
    if process.returncode is None:
        kill_tree(process.pid)
        process.wait()
    process.stdout.close()
    process.stderr.close()


def _warn_once(status_fd: int) -> None:
    global _has_warned
    try:
        os.set_blocking(status_fd, False)
        with contextlib.suppress(BlockingIOError):
            if os.read(status_fd, 1) == sandbox_launcher.NOT_ISOLATED and not _has_warned:
                _has_warned = True
                print(
                    "mindrlhf: warning: this system allows no namespaces, so programs under test can reach the "
                    "network and write where this user may; their memory, time and processes are limited all the same",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        os.close(status_fd)
