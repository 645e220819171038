"""The transport over TCP: between the first ranks of the nodes, from and into the memory of their weight buffers.

Each node that has something for another opens a few connections to it (:mod:`mindrlhf.system.handshake`), which carry
for each transfer a signed message, {"transfer", "version", "since"}. With "since", the version that the receiver has,
the message holds what changed; else the bytes of the slice follow. These are not signed: the ranks that wrote them have
summed them, and rank 0 compares what lies in memory in the end with that
(:func:`mindrlhf.weights.publish.sync.check_received`).

What changed is without loss: places and new bits of the elements that differ. An update of reinforcement learning moves
a weight by about the learning rate, which for most weights is less than half a step of bfloat16: most elements keep
their bits. Where so many changed that their places and values would be more than the slice, it is sent whole.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.system.handshake import SignedConnection, UnauthenticatedPeer, admit, introduce
from mindrlhf.system.ports import listen
from mindrlhf.system.wire import ConnectionClosed, ProtocolError
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.slices import TensorSlice, chunks, sum_bits, sum_chunks
from mindrlhf.weights.publish.sync import Address, Transfer

# Fast networks limit what one connection carries.
NUM_STREAMS = 4
_CONNECT_TIMEOUT_S = 60.0
# Places of changes are 16-bit offsets into blocks of as many elements as they can tell apart.
_BLOCK_ELEMENTS = 1 << 16
COUNTS, OFFSETS, VALUES = "counts", "offsets", "values"


class TcpTransport:
    """Brings the transfers into the weight buffer of this node and out of it; one per node.

    Args:
        buffer: of this node.
        node: its number.
        host: its address, on which it waits for the others; None where nothing comes to this node.

    Attributes:
        sent_bytes: of transfers, or their changes, sent so far.
    """

    def __init__(self, buffer: WeightBuffer, node: int, host: str | None):
        self._buffer = buffer
        self._node = node
        self._listener = None
        if host is not None:
            self._listener = listen(host, backlog=64)
        self._transfers_of: dict[int, Sequence[Transfer]] = {}  # by bucket
        self._transfers: Sequence[Transfer] = ()  # of the bucket that is synced
        self._outgoing: dict[tuple[int, int], SignedConnection] = {}  # by node and stream
        self._incoming: dict[tuple[int, int], SignedConnection] = {}
        self._last_version: int | None = None  # that all nodes have, so that changes since then can travel
        self._sent: dict[int, np.ndarray] = {}  # the transfers that began here as they were then, flat
        self._passing: dict[int, dict[str, np.ndarray]] = {}  # changes that are to be sent on
        self.sent_bytes = 0
        self._failures: list[RunFailure] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> Address:
        """Address at which the other nodes reach this one."""
        return self._listener.getsockname()[:2]

    def connect(
        self, transfers: Sequence[Transfer], addresses: Mapping[int, Address], token: bytes, bucket: int = 0
    ) -> None:
        """Make ready for some transfers, in place of others; all nodes do it at the same time.

        Args:
            transfers: of all nodes.
            addresses: by node.
            token: a secret of the nodes.
            bucket: to which the transfers belong; those of other buckets remain.

        Raises:
            RunFailure: a node cannot be reached, or does not come.
        """
        self._hang_up()
        self._transfers_of[bucket], self._sent, self._last_version = transfers, {}, None
        streams = [
            (index % NUM_STREAMS, transfer) for own in self._transfers_of.values() for index, transfer in enumerate(own)
        ]
        wanted = {(hop[0], stream) for stream, transfer in streams if (hop := self._hop(transfer))[0] is not None}
        targets = {(hop[1], stream) for stream, transfer in streams if (hop := self._hop(transfer))[1] is not None}
        accepting = threading.Thread(target=self._guard, args=(partial(self._accept, wanted, token),))
        accepting.start()
        for node, stream in sorted(targets):
            self._guard(partial(self._call, node, stream, addresses, token))
        accepting.join()
        self._raise_failure()

    def sync(self, version: int, bucket: int = 0) -> dict[tuple[str, TensorSlice], int]:
        """Send what other nodes lack of ``version`` and receive what this one lacks, into the memory of its buffer.

        All nodes do it at the same time, after all ranks have written.

        Returns:
            The sums of the bits of what came, by tensor and source of the transfers, as it now lies in memory.

        Raises:
            RunFailure: a node cannot be reached any more, or something arrived that was not sent.
        """
        self._transfers = self._transfers_of[bucket]
        coming = [index for index, transfer in enumerate(self._transfers) if self._hop(transfer)[0] is not None]
        arrived = {index: threading.Event() for index in coming}
        sums: dict[tuple[str, TensorSlice], int] = {}
        threads = []
        for connections, move in ((self._outgoing, self._send), (self._incoming, self._receive)):
            for (node, stream), connection in connections.items():
                action = partial(move, connection, node, stream, version, arrived, sums)
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

    def _hop(self, transfer: Transfer) -> tuple[int | None, int | None]:
        """Return the nodes that a transfer comes from and goes to; None where it begins, ends or does not pass."""
        if self._node not in transfer.nodes:
            return None, None
        index = transfer.nodes.index(self._node)
        following = transfer.nodes[index + 1 : index + 2]
        return (transfer.nodes[index - 1] if index else None), (following[0] if following else None)

    def _own_transfers(self, stream: int, side: int, node: int) -> Iterator[tuple[int, Transfer]]:
        # In one order everywhere: of the transfers that have not arrived, the first is waited for by nobody before it.
        for index in range(stream, len(self._transfers), NUM_STREAMS):
            if self._hop(self._transfers[index])[side] == node:
                yield index, self._transfers[index]

    def _send(self, connection, node, stream, version, arrived, sums) -> None:
        for index, transfer in self._own_transfers(stream, 1, node):
            if index in arrived:
                arrived[index].wait()
            if self._failures:
                return
            header = {"transfer": index, "version": version, "since": self._last_version}
            view = self._buffer.view(transfer.name, transfer.slice)
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
        """Return what changed in a transfer that begins here since it was last sent, None if it has to go whole.

        A buffer of buckets is one that is to take little memory: nothing is kept to compare with.
        """
        if not may_repeat(view.dtype) or self._buffer.num_buckets > 1:
            return None
        flat, sent = np.ascontiguousarray(view).reshape(-1), self._sent.get(index)
        if sent is None:
            self._sent[index] = np.array(flat)
            return None
        changes = find_changes(sent, flat)
        np.copyto(sent, flat)
        return changes

    def _receive(self, connection, node, stream, version, arrived, sums) -> None:
        for index, transfer in self._own_transfers(stream, 0, node):
            header, changes = connection.receive()
            since = header.get("since")
            expected = {"transfer": index, "version": version, "since": since}
            if header != expected or since not in (None, self._last_version):
                raise ProtocolError(f"transfer {index} of version {version} was due, and {header} came")
            view = self._buffer.view(transfer.name, transfer.slice)
            checksum = self._receive_whole(connection, view) if since is None else _change(view, changes)
            with self._lock:
                key = (transfer.name, transfer.source)
                sums[key] = sums.get(key, 0) + checksum
                if since is not None and self._hop(transfer)[1] is not None:
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
        """Receive a slice and return the sum of its bits."""
        checksum = 0
        for chunk, buffer in _buffered(view):
            connection.receive_buffers([memoryview(buffer.reshape(-1).view(np.uint8))])
            checksum += sum_bits(buffer)  # which is in the cache, and several times as fast as scattered rows
            if buffer is not chunk:
                np.copyto(chunk, buffer)
        return checksum

    def _accept(self, wanted: set[tuple[int, int]], token: bytes) -> None:
        end_s = time.monotonic() + _CONNECT_TIMEOUT_S  # for all of them: unauthenticated peers may come without end
        while missing := wanted - self._incoming.keys():
            self._listener.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                other = min(missing)[0]
                raise RunFailure(f"node {other} did not connect to node {self._node} for the weights") from None
            connection.settimeout(None)
            with contextlib.suppress(UnauthenticatedPeer):
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
                error = RunFailure(f"the weight sync of nodes {self._node} and {node} failed ({error})")
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
    """Put changes into a slice and return the sum of all its bits."""
    try:
        apply_changes(view, changes)
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"changes cannot be read: {error}") from None
    return sum_chunks(view)


def _buffered(view: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the chunks of a slice, each with memory in one piece: its own, or a buffer that stays in the cache."""
    buffer = None
    for chunk in chunks(view):
        if chunk.flags.c_contiguous:
            yield chunk, chunk
            continue
        if buffer is None or buffer.shape != chunk.shape:
            buffer = np.empty_like(chunk, order="C")
        yield chunk, buffer


def may_repeat(dtype: np.dtype) -> bool:
    """Return whether elements of a dtype often keep their bits: with 4 bytes every element changes in every update."""
    return dtype.itemsize == 2


def find_changes(old: np.ndarray, new: np.ndarray) -> dict[str, np.ndarray] | None:
    """Return what makes ``new`` of ``old``, None where ``new`` itself is not larger.

    Args:
        old, new: of one dtype and size, flat.

    Returns:
        "counts" uint32 [blocks], the changed elements of each block of 65,536; "offsets" uint16 [changed], their places
        in their blocks; "values", their new values.
    """
    bits = np.dtype(f"u{new.itemsize}")
    places = np.flatnonzero(old.view(bits) != new.view(bits))
    num_blocks = -(-new.size // _BLOCK_ELEMENTS)
    if 4 * num_blocks + (2 + new.itemsize) * places.size >= new.nbytes:
        return None
    counts = np.bincount(places // _BLOCK_ELEMENTS, minlength=num_blocks)
    offsets = (places % _BLOCK_ELEMENTS).astype(np.uint16)
    return {COUNTS: counts.astype(np.uint32), OFFSETS: offsets, VALUES: new[places]}


def apply_changes(target: np.ndarray, changes: Mapping[str, np.ndarray]) -> None:
    """Put changes into an array of any shape, which need not lie in one piece; its elements count in C order.

    Raises:
        ValueError: they are not of this array.
    """
    counts, offsets, values = (changes[name] for name in (COUNTS, OFFSETS, VALUES))
    num_blocks = -(-target.size // _BLOCK_ELEMENTS)
    if len(counts) != num_blocks or not len(offsets) == len(values) == counts.sum() or values.dtype != target.dtype:
        raise ValueError("the changes are of another array")
    places = np.repeat(np.arange(num_blocks, dtype=np.int64) * _BLOCK_ELEMENTS, counts) + offsets
    if places.size and places.max() >= target.size:
        raise ValueError("a change lies outside of the array")
    if target.flags.c_contiguous:
        target.reshape(-1)[places] = values
    else:
        target[np.unravel_index(places, target.shape)] = values
