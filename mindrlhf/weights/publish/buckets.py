"""The pieces of an exchange as buckets, which ranks of the nodes that have them broadcast to ranks of the others.

The ranks of a node count; those with one number on all nodes make a lane. A bucket travels in one lane: from the rank
of the node that has the pieces to those of the nodes that lack them. The lanes get equal shares, so that every device
of a node works, and a node gets each byte through one device only. Pieces of one origin that go to the same nodes lie
end to end and are cut into buckets of one size: a rank needs one compiled graph for each of their kinds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from mindrlhf.weights.publish.sync import Piece
from mindrlhf.weights.tensors import TensorInfo

# Large enough for the network to be the limit; a device has two of them at a time.
BUCKET_BYTES = 64 << 20
# Each group of ranks takes buffers of the library of collectives on each of its devices, hundreds of MB.
MAX_GROUPS = 4
_ALIGNMENT_BYTES = 8  # of the widest element: no bucket ends within one


@dataclass(frozen=True)
class Part:
    """Some elements of a piece in a bucket.

    Attributes:
        piece: the piece.
        start, stop: which elements of its box, counted in C order.
        offset: where they begin in the bucket, in bytes.
    """

    piece: Piece
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """What one broadcast carries.

    Attributes:
        root: the rank that sends.
        ranks: of the lane that take part, ascending, ``root`` among them.
        size_bytes: a multiple of 8; that of all buckets with these ranks and root.
        parts: what lies in it.
    """

    root: int
    ranks: tuple[int, ...]
    size_bytes: int
    parts: tuple[Part, ...]


def plan_buckets(
    pieces: Sequence[Piece],
    nodes: Sequence[Sequence[int]],
    infos: Sequence[TensorInfo],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Return the buckets in the order in which every rank sends and receives those that it takes part in.

    Each element of each piece is in exactly one of them.

    Args:
        pieces: of all nodes.
        nodes: the ranks of each node, ascending.
        infos: the tensors of a board.
        bucket_bytes: the most that a bucket may hold, a multiple of 8.
    """
    assert bucket_bytes % _ALIGNMENT_BYTES == 0, f"buckets of {bucket_bytes} bytes would cut elements"
    element_bytes = {info.name: info.numpy_dtype.itemsize for info in infos}
    lanes = list(zip(*nodes))
    buckets = []
    for (origin, reached), own in _by_way(pieces).items():
        starts = [0, *accumulate(_align(piece.num_elements * element_bytes[piece.name]) for piece in own)]
        num_rounds = math.ceil(starts[-1] / (len(lanes) * bucket_bytes))
        size_bytes = _align(math.ceil(starts[-1] / max(1, len(lanes) * num_rounds)))
        for number, parts in enumerate(_fill(own, starts, size_bytes, element_bytes)):
            lane = lanes[number % len(lanes)]
            ranks = tuple(sorted(lane[node] for node in reached))
            buckets.append(Bucket(lane[origin], ranks, size_bytes, tuple(parts)))
    return buckets


def _by_way(pieces: Sequence[Piece]) -> dict[tuple[int, tuple[int, ...]], list[Piece]]:
    """Return the pieces by the node that has them and the nodes that a broadcast of them reaches.

    Where a node would be in too many groups, broadcasts reach all nodes; those that have a piece leave it.
    """
    groups = {tuple(sorted(piece.nodes)) for piece in pieces}
    everyone = tuple(sorted({node for group in groups for node in group}))
    is_wide = any(sum(node in group for group in groups) > MAX_GROUPS for node in everyone)
    ways: dict[tuple[int, tuple[int, ...]], list[Piece]] = {}
    for piece in pieces:
        reached = everyone if is_wide else tuple(sorted(piece.nodes))
        ways.setdefault((piece.nodes[0], reached), []).append(piece)
    return ways


def _fill(
    pieces: Sequence[Piece], starts: Sequence[int], size_bytes: int, element_bytes: dict[str, int]
) -> Iterator[list[Part]]:
    """Yield the parts of each bucket; ``starts`` says where the pieces lie, end to end, in bytes."""
    parts: list[Part] = []
    number = 0
    for piece, first in zip(pieces, starts):
        width = element_bytes[piece.name]
        begin, end = 0, piece.num_elements
        while begin < end:
            offset = first + begin * width - number * size_bytes
            if offset >= size_bytes:
                yield parts
                parts, number = [], number + 1
                continue
            stop = min(end, begin + (size_bytes - offset) // width)
            parts.append(Part(piece, begin, stop, offset))
            begin = stop
    if parts:
        yield parts


def _align(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
