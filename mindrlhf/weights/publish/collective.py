"""The transport over the devices' own network: ranks broadcast buckets of slices from their node's weight buffer.

Every rank has a part in it, not only the first of a node: it puts buckets together from the weight buffer, which all
ranks of a node map, or takes them apart into it. What broadcasts is given, so that this module needs no MindSpore:
:func:`mindrlhf.training.broadcast.open_broadcast`.

Each bucket goes from a node to all others, through the devices with one number on every node; buckets take the numbers
in turn, so that every device of a node carries its share. All buckets have one size: a rank needs one compiled graph
for each node that sends. A bucket holds bits as words of 32, whatever their dtype, so nothing on the way rounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.slices import num_elements
from mindrlhf.weights.publish.sync import Address, Transfer
from mindrlhf.weights.tensors import TensorInfo

WORD = np.dtype(np.int32)
# Large enough for the network to be the limit; a device has two of them at a time.
BUCKET_BYTES = 64 << 20
_ALIGNMENT_BYTES = 8  # of the widest element

# One broadcast: takes int32 [words] on the root and returns None; takes None on the other ranks and returns the words.
Broadcast = Callable[[np.ndarray | None], np.ndarray | None]
# Makes it, or returns the one there is, for ranks (ascending), the root among them, and a number of words. All these
# ranks do so at the same time.
OpenBroadcast = Callable[[tuple[int, ...], int, int], Broadcast]


@dataclass(frozen=True)
class Bucket:
    """Content of one broadcast.

    Attributes:
        root: the rank that sends.
        ranks: that take part, ascending, one of each node.
        parts: the transfers in it, each with where it begins, in bytes.
    """

    root: int
    ranks: tuple[int, ...]
    parts: tuple[tuple[Transfer, int], ...]


class CollectiveTransport:
    """Does what :class:`mindrlhf.weights.publish.tcp.TcpTransport` does; one per rank.

    Args:
        buffer: of this rank's node, writable.
        rank: this rank.
        nodes: the ranks of each node, ascending, as many on each.
        open_broadcast: see ``OpenBroadcast``.
        bucket_bytes: what a bucket holds: a multiple of 8, and no transfer is larger.

    Attributes:
        sent_bytes: of buckets that this rank has sent so far.
    """

    def __init__(
        self,
        buffer: WeightBuffer,
        rank: int,
        nodes: Sequence[Sequence[int]],
        open_broadcast: OpenBroadcast,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._buffer = buffer
        self._rank = rank
        self._nodes = nodes
        self._open_broadcast = open_broadcast
        self._bucket_bytes = bucket_bytes
        (self._node,) = (node for node, ranks in enumerate(nodes) if rank in ranks)
        self._buckets: dict[int, list[tuple[Bucket, Broadcast]]] = {}  # by bucket of the buffer
        self.sent_bytes = 0

    def connect(
        self, transfers: Sequence[Transfer], addresses: Mapping[int, Address], token: bytes, bucket: int = 0
    ) -> None:
        """Make ready for some transfers; ranks find each other without addresses and token."""
        self._buckets[bucket] = [
            (planned, self._open_broadcast(planned.ranks, planned.root, self._bucket_bytes // WORD.itemsize))
            for planned in plan_buckets(transfers, self._nodes, self._buffer.infos, self._bucket_bytes)
            if self._rank in planned.ranks
        ]

    def sync(self, version: int, bucket: int = 0) -> None:
        """Broadcast and receive; all ranks do it at the same time, in the same order."""
        for planned, broadcast in self._buckets[bucket]:
            if planned.root == self._rank:
                contents = np.zeros(self._bucket_bytes, np.uint8)
                for _, in_bucket, in_buffer in self._places(planned, contents):
                    np.copyto(in_bucket, in_buffer)
                broadcast(contents.view(WORD))
                self.sent_bytes += self._bucket_bytes
            else:
                for transfer, in_bucket, in_buffer in self._places(planned, broadcast(None).view(np.uint8)):
                    if self._node in transfer.nodes:
                        np.copyto(in_buffer, in_bucket)

    def close(self) -> None:
        """Forget the broadcasts; groups of ranks last as long as the process."""
        self._buckets = {}

    def _places(self, bucket: Bucket, contents: np.ndarray) -> Iterator[tuple[Transfer, np.ndarray, np.ndarray]]:
        """Yield each transfer with its views of the bucket's bytes and of the buffer."""
        for transfer, offset in bucket.parts:
            view = self._buffer.view(transfer.name, transfer.slice)
            yield transfer, contents[offset : offset + view.nbytes].view(view.dtype).reshape(view.shape), view


def plan_buckets(
    transfers: Sequence[Transfer],
    nodes: Sequence[Sequence[int]],
    infos: Sequence[TensorInfo],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Return the buckets in the order in which every rank sends and receives those that it takes part in.

    Args:
        transfers: of all nodes; each is in exactly one bucket.
        nodes, bucket_bytes: see :class:`CollectiveTransport`.
        infos: the tensors of a buffer.
    """
    element_bytes = {info.name: info.numpy_dtype.itemsize for info in infos}
    filled: list[tuple[int, list[tuple[Transfer, int]]]] = []  # the node that sends, and the parts
    for origin in range(len(nodes)):
        end = bucket_bytes  # nothing fits before the first bucket
        for transfer in transfers:
            if transfer.origin != origin:
                continue
            size_bytes = element_bytes[transfer.name] * num_elements(transfer.slice)
            if end + size_bytes > bucket_bytes:
                filled.append((origin, []))
                end = 0
            filled[-1][1].append((transfer, end))
            end += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    lanes = list(zip(*nodes))
    buckets = []
    for number, (origin, parts) in enumerate(filled):
        ranks = lanes[number % len(lanes)]
        buckets.append(Bucket(ranks[origin], tuple(sorted(ranks)), tuple(parts)))
    return buckets
