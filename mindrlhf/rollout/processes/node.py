"""The server processes of one node, for rank 0: called directly on its own node, over ``Rpc`` on the others."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from socket import socketpair
from typing import Any

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.processes.server import NodePlace, ServerProcess
from mindrlhf.rollout.vllm_options import VllmOptions, check_options
from mindrlhf.system.handshake import derived_key
from mindrlhf.system.ports import find_free_port
from mindrlhf.system.records import record
from mindrlhf.system.rpc import Lost, Pair, Rpc
from mindrlhf.weights.publish.buffer import WeightBuffer, WeightBufferError


@record
@dataclasses.dataclass(frozen=True)
class ProcessStatus:
    """Status of a server's process, for who waits for it.

    Attributes:
        pid: its number; 0 for one that is not there.
        ending: how it ended, with the end of its log, as the end of a sentence; empty while it runs.
    """

    pid: int
    ending: str


def server_key(key: bytes, number: str) -> bytes:
    """Return the token of one connection between rank 0 and a server of another node; ``number`` is a fresh one."""
    return derived_key(key, "rollout server", number)


class _Running:
    """A process, and this side of the socket pair that it serves."""

    def __init__(self, process: ServerProcess, pair: Pair | None) -> None:
        self.process = process
        self.pair = pair  # None: it has no engine
        self.link: Rpc | None = None  # by which it is told whom to serve, where that is not the owner of the pair

    def close(self) -> None:
        for end in (self.link, self.pair):
            if end is not None:
                end.close()


class NodeServers:
    """Starts, watches and ends the server processes of this node.

    Args:
        options: of each server, or of the part of the one server that lies here too.
        own_host: address of this node, where a server has parts on several.

    Attributes:
        buffer_path: of the weight buffer of this node.
        key: that rank 0 has too, where it is on another node.
    """

    def __init__(self, options: Sequence[VllmOptions], own_host: str = "") -> None:
        for each in options:
            check_options(each)
        self.options = tuple(options)
        self.own_host = own_host
        self.buffer_path = ""
        self.key = b""
        self._running: dict[int, _Running] = {}
        self._lock = threading.RLock()  # beats tell of processes while others start and end

    def start(self, index: int, span: NodePlace | None = None) -> int:
        """Start a server in the background, unless that was done; return the number of its process.

        Args:
            span: of a server over several nodes, the place of the process; its own address is filled in here.

        Raises:
            RunFailure: it cannot be started.
        """
        with self._lock:
            if index not in self._running:
                self._running[index] = self._launch(self.options[index], span)
            return self._running[index].process.pid

    def _launch(self, options: VllmOptions, span: NodePlace | None) -> _Running:
        if span is not None:
            span = dataclasses.replace(span, own_host=self.own_host)
            if span.number:
                log_path = options.log_path.removesuffix(".log") + "_part.log"
                process = ServerProcess(dataclasses.replace(options, log_path=log_path), ["--headless"], span=span)
                process.give_buffer(self.buffer_path)
                return _Running(process, None)
        ours, theirs = socketpair()
        with theirs:
            try:
                process = ServerProcess(options, ["--socket-fd", str(theirs.fileno())], [theirs.fileno()], span)
            except RunFailure:
                ours.close()
                raise
        return _Running(process, Pair(ours))

    def pair(self, index: int) -> Pair:
        return self._running[index].pair

    def connect(self, index: int, host: str, port: int, number: str) -> None:
        """Have a server, as soon as it can answer, connect to rank 0, which listens there, and serve it from then on.

        Both derive the token of the connection from ``number``.
        """
        token = server_key(self.key, number).hex()
        with suppress(RunFailure):  # its end is told by its status
            self._link(index).begin("connect", host=host, port=port, token=token, index=index)

    def part(self) -> int:
        """Wait until every server has noticed that rank 0 has gone; return how many samples they have made for it."""
        num_samples = 0
        for running in list(self._running.values()):
            with suppress(RunFailure):
                if running.link is not None and running.link.is_answering:
                    num_samples += running.link.result()
        return num_samples

    def wait_ready(self) -> None:
        """Block until every server can answer.

        Raises:
            RunFailure: one has ended.
        """
        for index in self._running:
            try:
                self._link(index).call("ready")
            except Lost:
                raise RunFailure(f"the rollout server {self.ending(index, 1.0)}") from None

    def _link(self, index: int) -> Rpc:
        running = self._running[index]
        if running.link is None:
            running.link = Rpc(running.pair, "the rollout server", check=self._raise_if_ended(index))
        return running.link

    def _raise_if_ended(self, index: int) -> Callable[[], None]:
        def check() -> None:
            if how := self.ending(index):
                raise RunFailure(f"the rollout server {how}")

        return check

    def ending(self, index: int, wait_s: float = 0.0) -> str:
        """Return how a process ended, if it does so within ``wait_s``; see :class:`ProcessStatus`."""
        with self._lock:
            running = self._running.get(index)
        if running is None:
            return "is not there"
        if wait_s:
            running.process.wait(wait_s)
        how = running.process.ending()
        return f"{how}{running.process.log_tail()}" if how else ""

    def log_tail(self, index: int) -> str:
        """Return the last lines of its log, as the end of a sentence."""
        return self._running[index].process.log_tail()

    def note(self, index: int) -> None:
        """Remember what the processes of a server that is up talk through, to be removed when they are killed."""
        self._running[index].process.note_shared_memory()

    def end(self, index: int, wait_s: float = 0.0) -> None:
        """End a process and all it left; one that was asked to end has ``wait_s`` for it."""
        with self._lock:
            running = self._running.pop(index, None)
        if running is not None:
            running.close()
            if wait_s:
                running.process.wait(wait_s)
            running.process.end()

    def address(self) -> tuple[str, int]:
        """Return where on this node the processes of a server over several nodes may find each other."""
        return self.own_host, find_free_port(self.own_host)

    def buffer(self) -> str:
        """Return the path of this node's weight buffer."""
        return self.buffer_path

    def holds(self, version: int) -> bool:
        """Return whether the weight buffer still has all of a version."""
        try:
            with WeightBuffer.attach(self.buffer_path) as buffer:
                return buffer.version == version and buffer.num_buckets == 1
        except WeightBufferError:
            return True  # the server's own attempt will say what is wrong with it

    def status(self, index: int) -> ProcessStatus:
        with self._lock:
            running = self._running.get(index)
        return ProcessStatus(0, "") if running is None else ProcessStatus(running.process.pid, self.ending(index))

    def tell(self) -> Mapping[str, Any]:
        """Return what each beat tells rank 0."""
        with self._lock:
            running = list(self._running)
        return {str(index): self.status(index) for index in running}

    def close(self) -> None:
        for index in list(self._running):
            self.end(index)
