"""The nodes that have rollout servers, as rank 0 sees them: its own, others that train, and those for rollout only."""

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.processes.node import NodeServers, ProcessStatus, server_key
from mindrlhf.system.handshake import accept_nodes
from mindrlhf.system.ports import listen
from mindrlhf.system.rpc import Connection, Rpc
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.slices import whole_slice
from mindrlhf.weights.publish.sync import Sums, Transfer, plan_sync
from mindrlhf.weights.publish.tcp import TcpTransport
from mindrlhf.weights.tensors import TensorInfo

LEAD, NODE = 0, 1  # the ends of a transfer of weights from rank 0 to a node for rollout only


class Node(Protocol):
    """A node with rollout servers.

    Attributes:
        name: in what is said of its servers; empty for rank 0's.
        may_leave: the run does without it when it is lost.
    """

    name: str
    may_leave: bool

    @property
    def lost(self) -> str:
        """Cause of its loss; empty while it is there."""

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of its :class:`NodeServers`."""

    def open(self, index: int, check: Callable[[], None], timeout_s: float) -> Connection:
        """Return a connection to one of its servers, which may have to come up first."""

    def status(self, index: int) -> ProcessStatus | None:
        """Return the last that is known here of a server's process."""


class OwnNode:
    """Rank 0's node, or that of a command that samples by itself."""

    name, may_leave, lost = "", False, ""

    def __init__(self, servers: NodeServers) -> None:
        self.servers = servers

    def call(self, method: str, **arguments: Any) -> Any:
        return getattr(self.servers, method)(**arguments)

    def open(self, index: int, check: Callable[[], None], timeout_s: float) -> Connection:
        return self.servers.pair(index)

    def status(self, index: int) -> ProcessStatus | None:
        return self.servers.status(index)


class OtherNode:
    """Another node, whose ``NodeServers`` are served over ``rpc``; any thread may use it.

    Args:
        host: address of this machine at which its servers reach rank 0.
        key: that the node has too, see :class:`NodeServers`.
        may_leave: see :class:`Node`.
    """

    def __init__(self, rpc: Rpc, host: str, key: bytes, *, may_leave: bool = False) -> None:
        self.name = rpc.name
        self.may_leave = may_leave
        self._rpc = rpc
        self._host = host
        self._key = key
        self._calling = threading.Lock()
        self._transport: TcpTransport | None = None

    @property
    def lost(self) -> str:
        return self._rpc.lost

    def call(self, method: str, **arguments: Any) -> Any:
        with self._calling:
            return self._rpc.call(method, **arguments)

    def open(self, index: int, check: Callable[[], None], timeout_s: float) -> Connection:
        host, number = self._host, secrets.token_hex(16)
        with listen(host, backlog=16) as listener:
            port = listener.getsockname()[1]
            self.call("connect", index=index, host=host, port=port, number=number)
            return accept_nodes(listener, server_key(self._key, number), [index], timeout_s, check)[index]

    def status(self, index: int) -> ProcessStatus | None:
        return self._rpc.told.get(str(index))

    def send_weights(self, version: int, buffer: WeightBuffer) -> None:
        """Bring a version into the weight buffer of a node for rollout only, which has none of the ranks to write it.

        Raises:
            RunFailure: the node is lost, or cannot take it.
        """
        if self._transport is None:
            infos = [[info.name, info.dtype, list(info.shape)] for info in buffer.infos]
            host, port = self.call("open_buffer", infos=infos)
            self._transport = TcpTransport(buffer, LEAD, None)
            self._transport.connect(transfers_of(buffer.infos), {NODE: (host, port)}, self._key)
        with self._calling:
            self._rpc.begin("take_weights", version=version, checksums=list(map(int, buffer.checksums(version))))
            try:
                self._transport.sync(version)
            except RunFailure:
                self.close()
                raise
            self._rpc.result()

    def drop(self, how: str, *, ends: bool = False) -> None:
        """Do without the node, for this reason; where it is the last word, the node hears it and ends too."""
        self._rpc.drop(how, tells=ends)
        self.close()

    def close(self) -> None:
        """End the conversation without a word."""
        self._rpc.close()
        if self._transport is not None:
            self._transport.close()  # also for a thread that waits in a sync


def whole_tensors(infos: Sequence[TensorInfo], checksums: Sequence[int]) -> Sums:
    """Return the sums of one that has written every tensor whole."""
    return {(info.name, whole_slice(info.shape)): each for info, each in zip(infos, checksums, strict=True)}


def transfers_of(infos: Sequence[TensorInfo]) -> list[Transfer]:
    """Return the transfers in which all tensors go from rank 0 to a node."""
    return plan_sync([whole_tensors(infos, [0] * len(infos)), {}], infos)
