"""The servers of a node for rollout only, for rank 0 of the run, which :mod:`mindrlhf.rollout.newcomers` accepts."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.rollout_nodes import ListenerAddress
from mindrlhf.rollout.newcomers import say
from mindrlhf.rollout.nodes import NODE, transfers_of, whole_tensors
from mindrlhf.rollout.processes.node import NodeServers
from mindrlhf.system.handshake import introduce
from mindrlhf.system.rpc import Rpc
from mindrlhf.system.wire import ProtocolError
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.sync import written_of
from mindrlhf.weights.publish.tcp import TcpTransport
from mindrlhf.weights.tensors import TensorInfo

_CONNECT_TIMEOUT_S = 5.0
_RETRY_INTERVAL_S = 0.5
_POLL_INTERVAL_S = 0.1
_GOODBYE_LIMIT_S = 2.0


def serve(servers: NodeServers, address: ListenerAddress, ending: Callable[[], object | None]) -> None:
    """Lend the servers of this node to rank 0, whenever it listens, until ``ending`` says something.

    Raises:
        RunFailure: the servers have failed for good.
    """
    service = _Service(servers, address)
    thread = threading.Thread(target=service.work, daemon=True)
    thread.start()
    while thread.is_alive() and ending() is None:
        thread.join(_POLL_INTERVAL_S)
    service.leave()
    thread.join(_GOODBYE_LIMIT_S)
    if service.failure is not None:
        raise service.failure


class _Service:
    """Serve the servers from a thread; another calls ``leave``."""

    def __init__(self, servers: NodeServers, address: ListenerAddress) -> None:
        self.failure: Exception | None = None
        self._servers = servers
        self._address = address
        self._key = servers.key = bytes.fromhex(address.key)
        self._is_over = False
        self._rpc: Rpc | None = None

    def work(self) -> None:
        """Wait for the servers, and serve rank 0 as often as it can be reached; note what failed here."""
        try:
            self._servers.wait_ready()
            say("the servers of this node are ready")
            while not self._is_over:
                if not self._serve_once():
                    time.sleep(_RETRY_INTERVAL_S)
        except Exception as error:
            if not self._is_over:
                self.failure = error

    def leave(self) -> None:
        """Tell rank 0 that this node leaves, at once; what its servers owe is for others to do."""
        self._is_over = True
        if (rpc := self._rpc) is not None:
            rpc.leave("leaves", _GOODBYE_LIMIT_S)

    def _serve_once(self) -> bool:
        """Serve rank 0 until it has gone; return False where it does not listen yet, or no more.

        Raises:
            RunFailure: rank 0 does without this node, for what it says.
        """
        try:
            connection = socket.create_connection((self._address.host, self._address.port), timeout=_CONNECT_TIMEOUT_S)
            connection.settimeout(None)
            signed = introduce(connection, self._key)
            signed.send({"host": socket.gethostname(), "num_servers": len(self._servers.options)})
            host = connection.getsockname()[0]
        except (OSError, ProtocolError):
            return False
        # Rank 0 compiles and computes in its own process, and may miss beats; that it lives the launchers watch.
        self._rpc = rpc = Rpc(signed, "rank 0", tell=self._servers.tell)
        with contextlib.closing(_Lent(self._servers, host, self._key)) as lent:
            if self._is_over:  # since before there was a connection to say so
                rpc.close()
            rpc.serve(lent)
            say(f"this node has made {self._servers.part()} samples for the run")
        if rpc.farewell:
            raise RunFailure(f"rank 0 does without this node: it {rpc.farewell}")
        return True


class _Lent:
    """The methods that rank 0 may call on one connection: all of ``NodeServers``, and to bring weights."""

    def __init__(self, servers: NodeServers, host: str, key: bytes) -> None:
        self._servers = servers
        self._host = host
        self._key = key
        self._buffer: WeightBuffer | None = None
        self._transport: TcpTransport | None = None
        self._awaiting: threading.Thread | None = None

    def __getattr__(self, name: str) -> Callable:
        return getattr(self._servers, name)

    def open_buffer(self, infos: Sequence[Sequence]) -> tuple[str, int]:
        """Make the weight buffer of this node, and return where rank 0 is to connect to bring weights into it."""
        tensors = tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in infos)
        self._buffer = WeightBuffer.create(tensors)
        self._transport = TcpTransport(self._buffer, NODE, self._host)
        self._servers.buffer_path = self._buffer.path
        # Rank 0 connects once it knows the address.
        self._awaiting = threading.Thread(target=self._await_rank_0, args=(transfers_of(tensors),), daemon=True)
        self._awaiting.start()
        return self._transport.address

    def _await_rank_0(self, transfers: list) -> None:
        with contextlib.suppress(RunFailure):  # which the next transfer raises again
            self._transport.connect(transfers, {}, self._key)

    def take_weights(self, version: int, checksums: Sequence[int]) -> None:
        self._awaiting.join()
        self._buffer.begin(version)
        self._transport.sync(version)
        self._buffer.commit(written_of(whole_tensors(self._buffer.infos, checksums)))

    def close(self) -> None:
        """Drop the weights, and the way by which they come."""
        if self._transport is not None:
            self._transport.close()
        if self._buffer is not None:
            self._buffer.close()
