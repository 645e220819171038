"""One process of a rollout server: its private directory, its log, what it leaves behind."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mindrlhf
from mindrlhf.errors import RunFailure
from mindrlhf.rollout.vllm_options import (
    PACKAGES_NAME,
    TEMPORARY_NAME,
    VllmOptions,
    plugin_of,
    server_environment,
    write_plugin,
)
from mindrlhf.system import heartbeat, processes
from mindrlhf.system.child import Child
from mindrlhf.system.files import take_directory
from mindrlhf.system.records import record

_BUFFER_NAME = "buffer"  # in the private directory of a process without a trainer to name it the weight buffer
# Of the trainer only; the server has no use for them.
_OWN_OPTIONS = ("python", "env", "log_path", "start_timeout_s", "num_threads")


@record
@dataclasses.dataclass(frozen=True)
class NodePlace:
    """Position of a process among those of a server that spans nodes.

    Attributes:
        num_nodes: of the server.
        number: of this node among them, from 0; number 0 has the engine.
        host, port: of number 0, where the processes find each other.
        own_host: address of this node.
    """

    num_nodes: int
    number: int
    host: str
    port: int
    own_host: str

    def at(self, number: int) -> "NodePlace":
        """Return the position of another process of the same server."""
        return dataclasses.replace(self, number=number)


class ServerProcess:
    """A running ``python -m mindrlhf.rollout.server``, in a session and a private directory of its own.

    Args:
        arguments: of its command line, beside its config.
        descriptors: that it inherits.
        span: where it stands in a server over several nodes; None for one within a node.

    Raises:
        RunFailure: it could not be started; nothing is left of it.
    """

    def __init__(
        self,
        options: VllmOptions,
        arguments: Sequence[str] = (),
        descriptors: Sequence[int] = (),
        span: NodePlace | None = None,
    ):
        self._shared_memory: set[str] = set()
        self._lock: int | None = None
        self.private_dir = ""
        try:
            self._make_private_dir(options)
        except OSError as error:
            self._remove_private_dir()
            where = f"{tempfile.gettempdir()} for its temporary files"
            raise RunFailure(
                f"the rollout server could not be started, with {where}: {error.strerror or error}; make room, or set "
                "TMPDIR to another disk"
            ) from error
        config = {
            entry.name: getattr(options, entry.name)
            for entry in dataclasses.fields(options)
            if entry.name not in _OWN_OPTIONS
        } | {"private_dir": self.private_dir, "model_dir": os.path.abspath(options.model_dir)}
        self._buffer_file = Path(self.private_dir, _BUFFER_NAME)
        config |= {"span": None if span is None else dataclasses.asdict(span), "buffer_file": str(self._buffer_file)}
        config |= {"starter_heartbeat": str(heartbeat.own_path() or "")}
        python = os.path.abspath(shutil.which(options.python))  # links are kept: they say which environment it is
        command = [python, "-m", "mindrlhf.rollout.server", *arguments, "--config", json.dumps(config)]
        try:
            self._process = Child(
                command,
                environment=server_environment(options, self.private_dir),
                directory=self.private_dir,
                output=Path(options.log_path),
                descriptors=[*descriptors, self._lock],
            )
        except OSError as error:
            self._remove_private_dir()
            raise RunFailure(f"the rollout server could not be started: {error}") from error

    def give_buffer(self, path: str) -> None:
        """Tell a process that has no connection to the trainer where the weight buffer of its node is."""
        partial = self._buffer_file.with_suffix(".partial")
        partial.write_text(path, encoding="utf-8")
        partial.replace(self._buffer_file)

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended, but no longer than ``timeout_s``."""
        self._process.wait(timeout_s)

    def ending(self) -> str:
        """Return how it ended, as the end of a sentence; empty while it runs."""
        code = self.poll()
        if code is None:
            return ""
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"

    def log_tail(self) -> str:
        """Return the last lines of its log, as the end of a sentence."""
        return self._process.last_lines()

    def note_shared_memory(self) -> None:
        """Remember what ranks of one server talk through: when they are killed, nobody else removes it."""
        pids = [self.pid, *(status.pid for status in processes.descendants(self.pid))]
        for pid in pids:
            self._shared_memory |= processes.shared_memory_files(pid)

    def end(self) -> None:
        """Kill it with all that it started, and remove what they leave."""
        self.note_shared_memory()
        self._process.kill()
        self._remove_private_dir()
        for path in self._shared_memory:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._shared_memory.clear()

    def _make_private_dir(self, options: VllmOptions) -> None:
        """Make the directory in which the server finds this package and nothing else of the trainer's site-packages.

        Its temporary files lie there too: vLLM leaves some behind when it is killed. The lock goes on to the server:
        the directory is in use while either lives, and the next start of anybody removes it when both were killed.
        """
        path, self._lock = take_directory(Path(tempfile.gettempdir()), processes.SERVER_PREFIX)
        self.private_dir = str(path)
        for name in (PACKAGES_NAME, TEMPORARY_NAME):
            os.mkdir(path / name)
        package = Path(mindrlhf.__file__).resolve().parent
        os.symlink(package, path / PACKAGES_NAME / package.name)
        if module := plugin_of(options.model_dir):
            write_plugin(path / PACKAGES_NAME, module)

    def _remove_private_dir(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            shutil.rmtree(self.private_dir, ignore_errors=True)
            self._lock = None
