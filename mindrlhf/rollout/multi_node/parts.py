"""The parts of a server that lie on further nodes, as the process that owns the server sees them.

One connection per part (:mod:`mindrlhf.system.handshake`), on which the owner asks and the part's supervisor answers:

    start {number, num_nodes, host, port}    nothing; the process joins the one with the engine at that address
    note                                     nothing; all are up, so what they leave when killed can be seen
    stop                                     stopped, when the process and all it left are gone

"ended {how}" comes unasked when a process has ended by itself.
"""

import contextlib
import time
from collections.abc import Mapping

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.processes.server import NodePlace
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.system.ports import find_free_port
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

_STOP_TIMEOUT_S = 30.0


class ServerParts:
    """Starts, watches and ends the parts of one server; see :class:`mindrlhf.rollout.vllm.Parts`.

    Args:
        connections: to the supervisors of the parts, by node.
        host: address of this node, for the processes of the others.
    """

    def __init__(self, connections: Mapping[int, SignedConnection], host: str):
        self._connections = dict(sorted(connections.items()))
        self._host = host
        self._running: set[int] = set()  # nodes
        self._failure = ""

    def start(self) -> NodePlace:
        """Start all parts, and return the place of the process with the engine.

        Raises:
            RunFailure: a node is gone.
        """
        # A port of its own for each start: connections of the last one may not be over yet.
        port, num_nodes = find_free_port(self._host), len(self._connections) + 1
        self._failure = ""
        for number, (node, connection) in enumerate(self._connections.items(), start=1):
            place = {"number": number, "num_nodes": num_nodes, "host": self._host, "port": port}
            try:
                connection.send({"kind": "start", **place})
            except ConnectionClosed as error:
                raise RunFailure(f"the rollout server could not be started: {_gone(node, error)}") from None
            self._running.add(node)
        return NodePlace(num_nodes, 0, self._host, port, self._host)

    def note_shared_memory(self) -> None:
        """Have the supervisors remember what is to be removed; see :class:`mindrlhf.rollout.vllm.Parts`."""
        for connection in self._connections.values():
            with contextlib.suppress(ConnectionClosed):  # ``failure`` says so
                connection.send({"kind": "note"})

    def failure(self, wait_s: float = 0.0) -> str:
        """Return which part has ended and how, as the end of a sentence; see :class:`mindrlhf.rollout.vllm.Parts`."""
        end_s = time.monotonic() + wait_s
        while not self._failure:
            for node, connection in self._connections.items():
                if node in self._running and connection.has_news():
                    self._read(node, connection)
            if time.monotonic() >= end_s:
                break
            time.sleep(0.05)
        return self._failure

    def stop(self) -> None:
        """End all parts; a node that is gone has ended its own."""
        for node in self._running:
            with contextlib.suppress(ConnectionClosed):
                self._connections[node].send({"kind": "stop"})
        for node in self._running:
            with contextlib.suppress(ConnectionClosed, ProtocolError, TimeoutError):
                while self._connections[node].receive(_STOP_TIMEOUT_S)[0]["kind"] != "stopped":
                    pass
        self._running.clear()

    def close(self) -> None:
        """End the connections, and with them the parts that still run."""
        for connection in self._connections.values():
            connection.close()

    def _read(self, node: int, connection: SignedConnection) -> None:
        try:
            header, _ = connection.receive()
        except (ConnectionClosed, ProtocolError) as error:
            self._failure = f"has lost a part: {_gone(node, error)}"
            self._running.discard(node)
            return
        if header["kind"] == "ended":
            self._failure = f"has lost its part on node {node}, which {header['how']}"


def _gone(node: int, error: Exception) -> str:
    return f"the first rank of node {node}, which starts the part there, died ({error})"
