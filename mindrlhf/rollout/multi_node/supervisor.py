"""The process of a server whose engine is on another node: started, watched and ended by the first rank of this one."""

import contextlib
import sys
import threading

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.processes.server import NodePlace, ServerProcess
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.system.handshake import SignedConnection, introduce_node
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

_POLL_S = 0.5
_CLOSE_TIMEOUT_S = 30.0


class PartSupervisor:
    """Does by a thread of its own what the owner of the server asks; see :mod:`mindrlhf.rollout.multi_node.parts`.

    Args:
        options: of the server, with a log of this part.
        own_host: address of this node.
        buffer_path: of the weight buffer of this node, which the process maps.
    """

    def __init__(self, options: VllmOptions, own_host: str, buffer_path: str):
        self._options = options
        self._own_host = own_host
        self._buffer_path = buffer_path
        self._process: ServerProcess | None = None
        self._connection: SignedConnection | None = None
        self._thread: threading.Thread | None = None

    def join(self, host: str, port: int, token: bytes, node: int) -> None:
        """Connect to the owner, which accepts when all have been asked to, and serve it from now on."""
        self._thread = threading.Thread(target=self._run, args=(host, port, token, node), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process, and what is said to the owner."""
        if self._connection is not None:
            self._connection.close()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self, host: str, port: int, token: bytes, node: int) -> None:
        try:
            self._connection = introduce_node(host, port, token, node)
        except (OSError, ProtocolError) as error:
            message = f"the owner of a rollout server cannot be reached at {host}:{port} ({error})"
            print(f"warning: {message}", file=sys.stderr, flush=True)
            return
        try:
            # When the owner has gone, so has what the process works for.
            with contextlib.suppress(ConnectionClosed, ProtocolError):
                self._serve(self._connection)
        finally:
            self._end()

    def _serve(self, connection: SignedConnection) -> None:
        while True:
            while not connection.has_news(_POLL_S):
                if self._process is not None and (how := self._process.ending()):
                    self._report(connection, f"(process {self._process.pid}) {how}{self._process.log_tail()}")
            header, _ = connection.receive()
            if header["kind"] == "note":
                if self._process is not None:
                    self._process.note_shared_memory()
                continue
            self._end()
            if header["kind"] == "stop":
                connection.send({"kind": "stopped"})
                continue
            span = NodePlace(header["num_nodes"], header["number"], header["host"], header["port"], self._own_host)
            try:
                self._process = ServerProcess(self._options, ["--headless"], span=span)
                self._process.give_buffer(self._buffer_path)
            except (RunFailure, OSError) as failure:
                self._report(connection, f"did not start: {failure}")

    def _report(self, connection: SignedConnection, how: str) -> None:
        self._end()
        connection.send({"kind": "ended", "how": how})

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None
