"""The carrier over TCP: between the first ranks of the nodes, from and into the memory of their boards.

Each node that has something for another opens a few connections to it (:mod:`mindrlhf.system.handshake`), which carry
for each piece a signed message, {"piece", "version", "since"}. With "since", the version that the receiver has, the
message holds what changed (:mod:`mindrlhf.weights.publish.delta`); else the piece's bytes follow. These are not
signed: the ranks that wrote them have summed them, and rank 0 compares what lies in memory in the end with that
(:func:`mindrlhf.weights.publish.sync.check_received`).
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.system.handshake import SignedConnection, Stranger, admit, introduce
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, family_of
from mindrlhf.weights.publish.buffer import WeightBoard
from mindrlhf.weights.publish.carrier import Address
from mindrlhf.weights.publish.delta import apply_changes, find_changes, may_repeat
from mindrlhf.weights.publish.slices import Box
from mindrlhf.weights.publish.sums import sum_bits
from mindrlhf.weights.publish.sync import Piece

# Fast networks limit what one connection carries.
NUM_STREAMS = 4
_CHUNK_BYTES = 1 << 20  # summed while it is in the cache
_CONNECT_TIMEOUT_S = 60.0


class TcpCarrier:
    """A :class:`mindrlhf.weights.publish.carrier.Carrier`.

    Args:
        board: of this node.
        node: its number.
        host: its address, on which it waits for the others; None where nothing comes to this node.

    Attributes:
        sent_bytes: of pieces, or their changes, sent so far.
    """

    def __init__(self, board: WeightBoard, node: int, host: str | None):
        self._board = board
        self._node = node
        self._listener = None
        if host is not None:
            self._listener = socket.create_server((host, 0), family=family_of(host), backlog=64)
        self._pieces_of: dict[int, Sequence[Piece]] = {}  # by bucket
        self._pieces: Sequence[Piece] = ()  # of the bucket that is exchanged
        self._outgoing: dict[tuple[int, int], SignedConnection] = {}  # by node and stream
        self._incoming: dict[tuple[int, int], SignedConnection] = {}
        self._last_version: int | None = None  # that all nodes have, so that changes since then can travel
        self._sent: dict[int, np.ndarray] = {}  # the pieces that began here as they were then, flat
        self._passing: dict[int, dict[str, np.ndarray]] = {}  # changes that are to be sent on
        self.sent_bytes = 0
        self._failures: list[RunFailure] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> Address:
        """Where the other nodes reach this one."""
        return self._listener.getsockname()[:2]

    def connect(
        self, pieces: Sequence[Piece], addresses: Mapping[int, Address], token: bytes, bucket: int = 0
    ) -> None:
        """See :meth:`mindrlhf.weights.publish.carrier.Carrier.connect`."""
        self._hang_up()
        self._pieces_of[bucket], self._sent, self._last_version = pieces, {}, None
        streams = [
            (index % NUM_STREAMS, piece) for own in self._pieces_of.values() for index, piece in enumerate(own)
        ]
        wanted = {(hop[0], stream) for stream, piece in streams if (hop := self._hop(piece))[0] is not None}
        targets = {(hop[1], stream) for stream, piece in streams if (hop := self._hop(piece))[1] is not None}
        accepting = threading.Thread(target=self._guard, args=(partial(self._accept, wanted, token),))
        accepting.start()
        for node, stream in sorted(targets):
            self._guard(partial(self._call, node, stream, addresses, token))
        accepting.join()
        self._raise_failure()

    def exchange(self, version: int, bucket: int = 0) -> dict[tuple[str, Box], int]:
        """See :meth:`mindrlhf.weights.publish.carrier.Carrier.exchange`."""
        self._pieces = self._pieces_of[bucket]
        coming = [index for index, piece in enumerate(self._pieces) if self._hop(piece)[0] is not None]
        arrived = {index: threading.Event() for index in coming}
        sums: dict[tuple[str, Box], int] = {}
        threads = []
        for connections, transfer in ((self._outgoing, self._send), (self._incoming, self._receive)):
            for (node, stream), connection in connections.items():
                action = partial(transfer, connection, node, stream, version, arrived, sums)
                threads.append(threading.Thread(target=self._guard, args=(action, node, arrived)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._raise_failure()
        self._last_version, self._passing = version, {}
        return sums

    def close(self) -> None:
        """End the connections."""
        self._hang_up()
        if self._listener is not None:
            self._listener.close()

    def _hop(self, piece: Piece) -> tuple[int | None, int | None]:
        """Return the nodes that a piece comes from and goes to; None where it begins, ends or does not pass."""
        if self._node not in piece.nodes:
            return None, None
        index = piece.nodes.index(self._node)
        following = piece.nodes[index + 1 : index + 2]
        return (piece.nodes[index - 1] if index else None), (following[0] if following else None)

    def _own_pieces(self, stream: int, side: int, node: int) -> Iterator[tuple[int, Piece]]:
        # In one order everywhere: of the pieces that have not arrived, the first is waited for by nobody before it.
        for index in range(stream, len(self._pieces), NUM_STREAMS):
            if self._hop(self._pieces[index])[side] == node:
                yield index, self._pieces[index]

    def _send(self, connection, node, stream, version, arrived, sums) -> None:
        for index, piece in self._own_pieces(stream, 1, node):
            if index in arrived:
                arrived[index].wait()
            if self._failures:
                return
            header = {"piece": index, "version": version, "since": self._last_version}
            view = self._board.view(piece.name, piece.box)
            changes = self._passing.get(index) if index in arrived else self._changes(index, view)
            if changes is not None:
                connection.send(header, changes)
                num_bytes = sum(array.nbytes for array in changes.values())
            else:
                connection.send({**header, "since": None})
                self._send_whole(connection, view)
                num_bytes = view.nbytes
            with self._lock:
                self.sent_bytes += num_bytes

    def _changes(self, index: int, view: np.ndarray) -> dict[str, np.ndarray] | None:
        """Return what changed in a piece that begins here since it was last sent, None if it has to go whole.

        A board of buckets is one that is to take little memory: nothing is kept to compare with.
        """
        if not may_repeat(view.dtype) or self._board.num_buckets > 1:
            return None
        flat, sent = np.ascontiguousarray(view).reshape(-1), self._sent.get(index)
        if sent is None:
            self._sent[index] = np.array(flat)
            return None
        changes = find_changes(sent, flat)
        np.copyto(sent, flat)
        return changes

    def _receive(self, connection, node, stream, version, arrived, sums) -> None:
        for index, piece in self._own_pieces(stream, 0, node):
            header, changes = connection.receive()
            since = header.get("since")
            expected = {"piece": index, "version": version, "since": since}
            if header != expected or since not in (None, self._last_version):
                raise ProtocolError(f"piece {index} of version {version} was due, and {header} came")
            view = self._board.view(piece.name, piece.box)
            checksum = self._receive_whole(connection, view) if since is None else _change(view, changes)
            with self._lock:
                key = (piece.name, piece.region)
                sums[key] = sums.get(key, 0) + checksum
                if since is not None and self._hop(piece)[1] is not None:
                    self._passing[index] = changes
            arrived[index].set()

    @staticmethod
    def _send_whole(connection: SignedConnection, view: np.ndarray) -> None:
        # Not by sendfile: it spares the sender a copy, but then the receiver's misses the cache and takes longer.
        for chunk, buffer in _buffered(view):
            if buffer is not chunk:
                np.copyto(buffer, chunk)
            connection.send_buffers([memoryview(buffer.reshape(-1).view(np.uint8))])

    @staticmethod
    def _receive_whole(connection: SignedConnection, view: np.ndarray) -> int:
        """Receive into a region and return the sum of its bits."""
        checksum = 0
        for chunk, buffer in _buffered(view):
            connection.receive_buffers([memoryview(buffer.reshape(-1).view(np.uint8))])
            checksum += sum_bits(buffer)  # which is in the cache, and several times as fast as scattered rows
            if buffer is not chunk:
                np.copyto(chunk, buffer)
        return checksum

    def _accept(self, wanted: set[tuple[int, int]], token: bytes) -> None:
        end_s = time.monotonic() + _CONNECT_TIMEOUT_S  # for all of them: strangers may come without end
        while missing := wanted - self._incoming.keys():
            self._listener.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                other = min(missing)[0]
                raise RunFailure(f"node {other} did not connect to node {self._node} for the weights") from None
            connection.settimeout(None)
            with contextlib.suppress(Stranger):
                signed = admit(connection, token)
                header, _ = signed.receive(_CONNECT_TIMEOUT_S)
                self._incoming[int(header["node"]), int(header["stream"])] = signed

    def _call(self, node: int, stream: int, addresses: Mapping[int, Address], token: bytes) -> None:
        host, port = addresses[node]
        try:
            connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
            connection.settimeout(None)
            signed = introduce(connection, token, _CONNECT_TIMEOUT_S)
            signed.send({"node": self._node, "stream": stream})
        except (OSError, ProtocolError) as error:
            raise RunFailure(f"node {node} cannot be reached at {host}:{port} for the weights ({error})") from None
        self._outgoing[node, stream] = signed

    def _guard(
        self, action: Callable[[], None], node: int | None = None, arrived: Mapping[int, threading.Event] | None = None
    ) -> None:
        """Do something in a thread; if it fails, note why and let the other threads end."""
        try:
            action()
        except Exception as error:
            if isinstance(error, (ConnectionClosed, ProtocolError)) and node is not None:
                error = RunFailure(f"the exchange of weights between nodes {self._node} and {node} failed ({error})")
            self._failures.append(error)
            for event in (arrived or {}).values():
                event.set()
            self._hang_up()

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures[0]

    def _hang_up(self) -> None:
        for connection in (*self._outgoing.values(), *self._incoming.values()):
            connection.close()
        self._outgoing, self._incoming = {}, {}


def _change(view: np.ndarray, changes: Mapping[str, np.ndarray]) -> int:
    """Put changes into a region and return the sum of all its bits."""
    try:
        apply_changes(view, changes)
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"changes cannot be read: {error}") from None
    return sum(sum_bits(chunk) for chunk in _chunks(view))


def _chunks(view: np.ndarray) -> Iterator[np.ndarray]:
    """Cut a region into parts that fit the cache; one that lies in one piece anywhere, else along its first axis."""
    if view.flags.c_contiguous:
        view = view.reshape(-1)
    if view.size:
        num_rows = max(1, _CHUNK_BYTES // (view.nbytes // len(view)))
        for start in range(0, len(view), num_rows):
            yield view[start : start + num_rows]


def _buffered(view: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the parts of a region, each with memory in one piece: its own, or a buffer that stays in the cache."""
    buffer = None
    for chunk in _chunks(view):
        if chunk.flags.c_contiguous:
            yield chunk, chunk
            continue
        if buffer is None or buffer.shape != chunk.shape:
            buffer = np.empty_like(chunk, order="C")
        yield chunk, buffer
