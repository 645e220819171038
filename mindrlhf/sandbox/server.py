"""The warm launcher of this process: started at the first program, ended with this process."""

import contextlib
import fcntl
import functools
import json
import os
import socket
import sys
import threading
from collections.abc import Collection

from mindrlhf.errors import UserError
from mindrlhf.sandbox import launcher
from mindrlhf.system.child import PIPE, Child

START_TIMEOUT_S = 60.0
# The verifier and the tool that run programs of the model.
RUN_PROGRAMS = frozenset({"code_execution", "python"})
STRONG = (
    frozenset({"namespaces"}),
    frozenset({"seccomp", "landlock"}),
    frozenset({"seccomp", "user"}),
)

_lock = threading.Lock()


def input_file(text: str) -> int:
    """Return a descriptor of a file that holds ``text``, lies in memory and cannot be written any more."""
    writing = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(writing), "wb") as file:
            file.write(text.encode(errors="surrogatepass"))
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(writing, fcntl.F_ADD_SEALS, seals)
        return os.open(f"/proc/self/fd/{writing}", os.O_RDONLY)
    finally:
        os.close(writing)


class LauncherServer:
    """A launcher and the socket by which programs are handed to it. Threads may share one; forked processes may not."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Start it.

        Args:
            without: layers of protection not to use, for tests of the others.

        Raises:
            OSError: it does not start.
        """
        self._control, theirs = socket.socketpair()
        self.pid_of_owner = os.getpid()
        self._main_numbers: dict[str, int] = {}
        settings = {"control_fd": theirs.fileno(), "without": sorted(without)}
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/"}
        with theirs:
            self._process = Child(
                [os.path.realpath(sys.executable), "-I", "-B", launcher.__file__, json.dumps(settings)],
                error=PIPE,
                environment=environment,
                directory="/",
                descriptors=(theirs.fileno(),),
            )
        self._control.settimeout(START_TIMEOUT_S)
        line = b""
        with contextlib.suppress(OSError):
            while not line.endswith(b"\n") and (chunk := self._control.recv(4096)):
                line += chunk
        if not line.endswith(b"\n"):
            self.close()
            last_words = self._process.error.read().decode(errors="replace").strip()[-500:]
            raise OSError(f"the sandbox's launcher does not start: {last_words}")
        self.layers: frozenset[str] = frozenset(json.loads(line)["layers"])
        self._process.error.close()

    @property
    def is_alive(self) -> bool:
        return self.pid_of_owner == os.getpid() and self._process.poll() is None

    def launch(self, descriptors: Collection[int]) -> None:
        """Hand over the descriptors of one program: channel, standard input, output, error, link."""
        socket.send_fds(self._control, [b"p"], list(descriptors))

    def number_of_main(self, source: str) -> int:
        """Return the number of a main file of this package; at its first use the launcher compiles it."""
        with _lock:
            if source not in self._main_numbers:
                fd = input_file(source)
                try:
                    socket.send_fds(self._control, [b"m"], [fd])
                finally:
                    os.close(fd)
                self._main_numbers[source] = len(self._main_numbers)
            return self._main_numbers[source]

    def close(self) -> None:
        """End the launcher and every program it has started."""
        self._control.close()
        if self.pid_of_owner == os.getpid():
            self._process.kill()


_server: LauncherServer | None = None
_has_warned = False


def shared_server() -> LauncherServer:
    """Return this process's launcher; start it when there is none, or it has died.

    Raises:
        OSError: it does not start.
    """
    global _server, _has_warned
    with _lock:
        if _server is None or not _server.is_alive:
            _server = LauncherServer()
            if not is_strong(_server.layers) and not _has_warned:
                _has_warned = True
                print(
                    "mindrlhf: warning: this system allows no namespaces and too few other locks "
                    f"({describe(_server.layers)}), so programs under test can reach what this user may; their memory, "
                    "time and processes are limited all the same",
                    file=sys.stderr,
                    flush=True,
                )
        return _server


def is_strong(layers: Collection[str]) -> bool:
    """True if the layers keep a program from the network, other processes and the user's files."""
    return any(needed <= set(layers) for needed in STRONG)


def describe(layers: Collection[str]) -> str:
    return ", ".join(sorted(layers))


@functools.cache
def active_layers() -> frozenset[str]:
    """Return the names of the sandbox's layers that this machine allows; none where no program can be run at all."""
    try:
        probe = LauncherServer()
    except OSError:
        return frozenset()
    probe.close()
    return probe.layers


def check_for(names: Collection[str], allow_weak: bool, switch: str = "sandbox.allow_weak=true") -> str:
    """Return what ``check_strong`` does when one of these verifiers and tools runs the model's programs, else nothing.

    Raises:
        UserError: as ``check_strong``.
    """
    return "" if RUN_PROGRAMS.isdisjoint(names) else check_strong(allow_weak, switch)


def check_strong(allow_weak: bool, switch: str = "sandbox.allow_weak=true") -> str:
    """Return, for the log, which layers keep programs in.

    Args:
        switch: what to write to set ``allow_weak``.

    Raises:
        UserError: too few for programs that nobody trusts, and ``allow_weak`` is not set.
    """
    layers = active_layers()
    if not is_strong(layers) and not allow_weak:
        raise UserError(
            f"this system gives the sandbox too few isolation layers ({describe(layers) or 'none'}): programs of "
            f"the model could reach the network and this user's files: allow namespaces or Landlock, or give {switch} "
            "in a container with nothing to lose"
        )
    return describe(layers)
