"""The carrier over the devices' own network: ranks broadcast buckets from the board of their node to other boards.

Every rank has a part in it, not only the first of a node: it puts buckets together from the board, which all ranks of a
node map, or takes them apart into it (:mod:`mindrlhf.weights.publish.buckets`). What broadcasts is given, so that this
module needs no MindSpore: :func:`mindrlhf.training.sharded.broadcast.open_broadcast`.

A bucket holds bits as words of 32, whatever their dtype: one graph serves all, and nothing on the way rounds.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from mindrlhf.weights.publish.buckets import BUCKET_BYTES, Bucket, Part, plan_buckets
from mindrlhf.weights.publish.buffer import WeightBoard
from mindrlhf.weights.publish.carrier import Address
from mindrlhf.weights.publish.slices import Box
from mindrlhf.weights.publish.sums import sum_bits
from mindrlhf.weights.publish.sync import Piece

WORD = np.dtype(np.int32)

# One broadcast: takes int32 [words] on the root and returns None; takes None on the other ranks and returns the words.
Broadcast = Callable[[np.ndarray | None], np.ndarray | None]
# Makes it, or returns the one there is, for ranks (ascending), the root among them, and a number of words. All these
# ranks do so at the same time.
OpenBroadcast = Callable[[tuple[int, ...], int, int], Broadcast]


class CollectiveCarrier:
    """A :class:`mindrlhf.weights.publish.carrier.Carrier`, one per rank; every version travels whole.

    Args:
        board: of this rank's node, writable.
        rank: this rank.
        nodes: the ranks of each node, ascending.
        open_broadcast: see ``OpenBroadcast``.
        bucket_bytes: the most that a bucket may hold.

    Attributes:
        address: none; ranks find each other through the library of collectives.
        sent_bytes: of buckets that this rank has sent so far.
    """

    address: Address = ("", 0)

    def __init__(
        self,
        board: WeightBoard,
        rank: int,
        nodes: Sequence[Sequence[int]],
        open_broadcast: OpenBroadcast,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._board = board
        self._rank = rank
        self._nodes = nodes
        self._open_broadcast = open_broadcast
        self._bucket_bytes = bucket_bytes
        (self._node,) = (node for node, ranks in enumerate(nodes) if rank in ranks)
        self._buckets: dict[int, list[tuple[Bucket, Broadcast]]] = {}  # by bucket of the board
        self.sent_bytes = 0

    def connect(
        self, pieces: Sequence[Piece], addresses: Mapping[int, Address], token: bytes, bucket: int = 0
    ) -> None:
        """See :meth:`mindrlhf.weights.publish.carrier.Carrier.connect`; addresses and token are not needed."""
        self._buckets[bucket] = [
            (one, self._open_broadcast(one.ranks, one.root, one.size_bytes // WORD.itemsize))
            for one in plan_buckets(pieces, self._nodes, self._board.infos, self._bucket_bytes)
            if self._rank in one.ranks
        ]

    def exchange(self, version: int, bucket: int = 0) -> dict[tuple[str, Box], int]:
        """See :meth:`mindrlhf.weights.publish.carrier.Carrier.exchange`; all ranks do it, also in the same order.

        Returns:
            The regions of which something came through this rank, each with the sum of the bits of that. Those of all
            ranks of a node add up to the sum of the region.
        """
        sums: Counter[tuple[str, Box]] = Counter()
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

    def _take_apart(self, bucket: Bucket, contents: np.ndarray, sums: Counter[tuple[str, Box]]) -> None:
        for part in bucket.parts:
            if self._node not in part.piece.nodes[1:]:
                continue
            for place, slab in self._places(part, contents):
                np.copyto(slab, place)
                sums[part.piece.name, part.piece.region] += sum_bits(slab)

    def _places(self, part: Part, contents: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield views of a bucket's bytes, each with the view of the board that belongs there."""
        offset = part.offset
        for slab in _slabs(self._board.view(part.piece.name, part.piece.box), part.start, part.stop):
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
