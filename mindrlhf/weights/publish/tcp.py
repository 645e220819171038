"""The transport over TCP: between the first ranks of the nodes, from and into the memory of their weight buffers.

Each node that has something for another opens one connection to it (:mod:`mindrlhf.system.handshake`), which carries
for each transfer a signed message, {"transfer", "version", "sum"}, and the bytes of the slice, whose sum is compared.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.system.handshake import SignedConnection, accept_nodes, introduce_node
from mindrlhf.system.ports import listen
from mindrlhf.system.wire import ConnectionClosed, ProtocolError
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.slices import sum_bits
from mindrlhf.weights.publish.sync import Address, Transfer


class TcpTransport:
    """Brings the transfers into the weight buffer of this node and out of it; one per node.

    Args:
        buffer: of this node.
        node: its number.
        host: its address, on which it waits for the others; None where nothing comes to this node.

    Attributes:
        sent_bytes: of transfers sent so far.
    """

    def __init__(self, buffer: WeightBuffer, node: int, host: str | None):
        self._buffer = buffer
        self._node = node
        self._listener = None if host is None else listen(host, backlog=64)
        self._transfers: dict[int, Sequence[Transfer]] = {}  # by bucket
        self._outgoing: dict[int, SignedConnection] = {}  # by node
        self._incoming: dict[int, SignedConnection] = {}
        self.sent_bytes = 0
        self._failures: list[Exception] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> Address:
        """Address at which the other nodes reach this one."""
        return self._listener.getsockname()[:2]

    def connect(
        self, transfers: Sequence[Transfer], addresses: Mapping[int, Address], token: bytes, bucket: int = 0
    ) -> None:
        """Make ready for some transfers, in place of others; all nodes do it at the same time.

        Raises:
            RunFailure: a node cannot be reached, or does not come.
        """
        self._transfers[bucket] = transfers
        wanted = {each.origin for each in transfers if self._node in each.nodes} - self._incoming.keys()
        targets = {node for each in transfers if each.origin == self._node for node in each.nodes}
        accepting = threading.Thread(target=self._guard, args=(partial(self._accept, wanted, token),))
        accepting.start()
        for node in sorted(targets - self._outgoing.keys()):
            self._guard(partial(self._call, node, addresses, token))
        accepting.join()
        self._raise_failure()

    def sync(self, version: int, bucket: int = 0) -> None:
        """Send what other nodes lack of ``version`` and receive what this one lacks, into the memory of its buffer.

        All nodes do it at the same time, after all ranks have written.

        Raises:
            RunFailure: a node cannot be reached any more, or something arrived that was not sent.
        """
        threads = []
        for connections, move in ((self._outgoing, self._send), (self._incoming, self._receive)):
            for node, connection in connections.items():
                action = partial(move, connection, node, version, bucket)
                threads.append(threading.Thread(target=self._guard, args=(action, node)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._raise_failure()

    def close(self) -> None:
        for connection in (*self._outgoing.values(), *self._incoming.values()):
            connection.close()
        if self._listener is not None:
            self._listener.close()

    def _between(self, origin: int, node: int, bucket: int) -> Iterator[tuple[int, Transfer, np.ndarray]]:
        """Yield what one node sends to another: its place in the plan, and its memory here."""
        for index, transfer in enumerate(self._transfers[bucket]):
            if transfer.origin == origin and node in transfer.nodes:
                yield index, transfer, self._buffer.view(transfer.name, transfer.slice)

    def _send(self, connection: SignedConnection, node: int, version: int, bucket: int) -> None:
        for index, _, view in self._between(self._node, node, bucket):
            contents = np.ascontiguousarray(view)
            connection.send({"transfer": index, "version": version, "sum": sum_bits(contents)})
            connection.send_buffers([memoryview(contents.reshape(-1).view(np.uint8))])
            with self._lock:
                self.sent_bytes += contents.nbytes

    def _receive(self, connection: SignedConnection, node: int, version: int, bucket: int) -> None:
        for index, transfer, view in self._between(node, self._node, bucket):
            header, _ = connection.receive()
            if header != {"transfer": index, "version": version, "sum": header.get("sum")}:
                raise ProtocolError(f"transfer {index} of version {version} was due, and {header} came")
            contents = view if view.flags.c_contiguous else np.empty_like(view, order="C")
            connection.receive_buffers([memoryview(contents.reshape(-1).view(np.uint8))])
            if sum_bits(contents) != header["sum"]:
                raise ProtocolError(f"tensor '{transfer.name}' came with other values than were sent")
            if contents is not view:
                np.copyto(view, contents)

    def _accept(self, wanted: set[int], token: bytes) -> None:
        self._incoming |= accept_nodes(self._listener, token, wanted)

    def _call(self, node: int, addresses: Mapping[int, Address], token: bytes) -> None:
        host, port = addresses[node]
        try:
            self._outgoing[node] = introduce_node(host, port, token, self._node)
        except (OSError, ProtocolError) as error:
            raise RunFailure(f"node {node} cannot be reached at {host}:{port} for the weights ({error})") from None

    def _guard(self, action: Callable[[], None], node: int | None = None) -> None:
        """Do something in a thread; if it fails, note why and have the other threads end."""
        try:
            action()
        except Exception as error:
            if isinstance(error, (ConnectionClosed, ProtocolError)) and node is not None:
                error = RunFailure(f"the weight sync of nodes {self._node} and {node} failed ({error})")
            self._failures.append(error)
            for connection in (*self._outgoing.values(), *self._incoming.values()):
                connection.close()

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures[0]
