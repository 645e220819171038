"""The transport over the devices' own network: ranks broadcast buckets from the weight buffer of their node to others.

Every rank has a part in it, not only the first of a node: it puts buckets together from the weight buffer, which all
ranks of a node map, or takes them apart into it. What broadcasts is given, so that this module needs no MindSpore:
:func:`mindrlhf.training.broadcast.open_broadcast`.

The ranks of a node count; those with one number on all nodes make a lane. A bucket travels in one lane: from the rank
of the node that has the slices to those of the nodes that lack them. The lanes get equal shares, so that every device
of a node works, and a node gets each byte through one device only. Transfers of one origin that go to the same nodes
lie end to end and are cut into buckets of one size: a rank needs one compiled graph for each of their kinds.

A bucket holds bits as words of 32, whatever their dtype: one graph serves all, and nothing on the way rounds.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.slices import TensorSlice, sum_bits
from mindrlhf.weights.publish.sync import Address, Transfer
from mindrlhf.weights.tensors import TensorInfo

WORD = np.dtype(np.int32)
# Large enough for the network to be the limit; a device has two of them at a time.
BUCKET_BYTES = 64 << 20
# Each group of ranks takes buffers of the library of collectives on each of its devices, hundreds of MB.
MAX_GROUPS = 4
_ALIGNMENT_BYTES = 8  # of the widest element: no bucket ends within one

# One broadcast: takes int32 [words] on the root and returns None; takes None on the other ranks and returns the words.
Broadcast = Callable[[np.ndarray | None], np.ndarray | None]
# Makes it, or returns the one there is, for ranks (ascending), the root among them, and a number of words. All these
# ranks do so at the same time.
OpenBroadcast = Callable[[tuple[int, ...], int, int], Broadcast]


@dataclass(frozen=True)
class BucketSlice:
    """Some elements of a transfer in a bucket.

    Attributes:
        transfer: the transfer.
        start, stop: which of its elements, counted in C order.
        offset: where they begin in the bucket, in bytes.
    """

    transfer: Transfer
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Content of one broadcast.

    Attributes:
        root: the rank that sends.
        ranks: of the lane that take part, ascending, ``root`` among them.
        size_bytes: a multiple of 8; that of all buckets with these ranks and root.
        parts: what lies in it.
    """

    root: int
    ranks: tuple[int, ...]
    size_bytes: int
    parts: tuple[BucketSlice, ...]


class CollectiveTransport:
    """Does what :class:`mindrlhf.weights.publish.tcp.TcpTransport` does; one per rank. Every version travels whole.

    Args:
        buffer: of this rank's node, writable.
        rank: this rank.
        nodes: the ranks of each node, ascending.
        open_broadcast: see ``OpenBroadcast``.
        bucket_bytes: the most that a bucket may hold.

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
            (one, self._open_broadcast(one.ranks, one.root, one.size_bytes // WORD.itemsize))
            for one in plan_buckets(transfers, self._nodes, self._buffer.infos, self._bucket_bytes)
            if self._rank in one.ranks
        ]

    def sync(self, version: int, bucket: int = 0) -> dict[tuple[str, TensorSlice], int]:
        """Broadcast and receive; all ranks do it at the same time, in the same order.

        Returns:
            The sums of the bits of what came through this rank, by tensor and source of the transfers. Those of all
            ranks of a node add up to the sum of the source.
        """
        sums: Counter[tuple[str, TensorSlice]] = Counter()
        for one, broadcast in self._buckets[bucket]:
            if one.root == self._rank:
                broadcast(self._put_together(one))
                self.sent_bytes += one.size_bytes
            else:
                self._take_apart(one, broadcast(None).view(np.uint8), sums)
        return dict(sums)

    def close(self) -> None:
        """Forget the broadcasts; groups of ranks last as long as the process."""
        self._buckets = {}

    def _put_together(self, bucket: Bucket) -> np.ndarray:
        contents = np.zeros(bucket.size_bytes, np.uint8)
        for part in bucket.parts:
            for place, slab in self._places(part, contents):
                np.copyto(place, slab)
        return contents.view(WORD)

    def _take_apart(self, bucket: Bucket, contents: np.ndarray, sums: Counter[tuple[str, TensorSlice]]) -> None:
        for part in bucket.parts:
            if self._node not in part.transfer.nodes[1:]:
                continue
            for place, slab in self._places(part, contents):
                np.copyto(slab, place)
                sums[part.transfer.name, part.transfer.source] += sum_bits(slab)

    def _places(self, part: BucketSlice, contents: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield views of a bucket's bytes, each with the view of the buffer that belongs there."""
        offset = part.offset
        for slab in _slabs(self._buffer.view(part.transfer.name, part.transfer.slice), part.start, part.stop):
            yield contents[offset : offset + slab.nbytes].view(slab.dtype).reshape(slab.shape), slab
            offset += slab.nbytes


def _slabs(view: np.ndarray, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield views that are together the elements ``start`` to ``stop`` of ``view`` in C order."""
    if view.flags.c_contiguous:
        yield view.reshape(-1)[start:stop]
        return
    row_size = view[0].size
    first, last = -(-start // row_size), stop // row_size  # the rows that are in it as a whole
    if first > last:
        yield from _slabs(view[last], start - last * row_size, stop - last * row_size)
        return
    if start < first * row_size:
        yield from _slabs(view[first - 1], start - (first - 1) * row_size, row_size)
    if first < last:
        yield view[first:last]
    if last * row_size < stop:
        yield from _slabs(view[last], 0, stop - last * row_size)


def plan_buckets(
    transfers: Sequence[Transfer],
    nodes: Sequence[Sequence[int]],
    infos: Sequence[TensorInfo],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Return the buckets in the order in which every rank sends and receives those that it takes part in.

    Each element of each transfer is in exactly one of them.

    Args:
        transfers: of all nodes.
        nodes: the ranks of each node, ascending.
        infos: the tensors of a buffer.
        bucket_bytes: the most that a bucket may hold, a multiple of 8.
    """
    assert bucket_bytes % _ALIGNMENT_BYTES == 0, f"buckets of {bucket_bytes} bytes would cut elements"
    element_bytes = {info.name: info.numpy_dtype.itemsize for info in infos}
    lanes = list(zip(*nodes))
    buckets = []
    for (origin, reached), own in _by_way(transfers).items():
        starts = [0, *accumulate(_align(transfer.num_elements * element_bytes[transfer.name]) for transfer in own)]
        num_rounds = math.ceil(starts[-1] / (len(lanes) * bucket_bytes))
        size_bytes = _align(math.ceil(starts[-1] / max(1, len(lanes) * num_rounds)))
        for number, parts in enumerate(_fill(own, starts, size_bytes, element_bytes)):
            lane = lanes[number % len(lanes)]
            ranks = tuple(sorted(lane[node] for node in reached))
            buckets.append(Bucket(lane[origin], ranks, size_bytes, tuple(parts)))
    return buckets


def _by_way(transfers: Sequence[Transfer]) -> dict[tuple[int, tuple[int, ...]], list[Transfer]]:
    """Return the transfers by the node that has them and the nodes that a broadcast of them reaches.

    Where a node would be in too many groups, broadcasts reach all nodes; those that have a transfer leave it.
    """
    groups = {tuple(sorted(transfer.nodes)) for transfer in transfers}
    everyone = tuple(sorted({node for group in groups for node in group}))
    is_wide = any(sum(node in group for group in groups) > MAX_GROUPS for node in everyone)
    ways: dict[tuple[int, tuple[int, ...]], list[Transfer]] = {}
    for transfer in transfers:
        reached = everyone if is_wide else tuple(sorted(transfer.nodes))
        ways.setdefault((transfer.nodes[0], reached), []).append(transfer)
    return ways


def _fill(
    transfers: Sequence[Transfer], starts: Sequence[int], size_bytes: int, element_bytes: dict[str, int]
) -> Iterator[list[BucketSlice]]:
    """Yield the parts of each bucket; ``starts`` says where the transfers lie, end to end, in bytes."""
    parts: list[BucketSlice] = []
    number = 0
    for transfer, first in zip(transfers, starts):
        width = element_bytes[transfer.name]
        begin, end = 0, transfer.num_elements
        while begin < end:
            offset = first + begin * width - number * size_bytes
            if offset >= size_bytes:
                yield parts
                parts, number = [], number + 1
                continue
            stop = min(end, begin + (size_bytes - offset) // width)
            parts.append(BucketSlice(transfer, begin, stop, offset))
            begin = stop
    if parts:
        yield parts


def _align(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
