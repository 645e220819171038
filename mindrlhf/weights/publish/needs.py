"""What the servers of a node read of each tensor, and the sums of what travels for that.

Where a generator spans several nodes, each of its workers reads a part of most tensors. What the workers of a node read
together is what its board needs (``needed`` of :func:`mindrlhf.weights.publish.sync.plan_exchange`). The ranks sum the
regions that they write; what travels is then less than such a region, and the node where it begins sums it. So that
nothing changes unseen, that node compares the regions with their sums in the same pass.
"""

from collections.abc import Iterable, Mapping, Sequence

from mindrlhf.errors import RunFailure
from mindrlhf.weights.publish.buffer import WeightBoard
from mindrlhf.weights.publish.slices import Box, divide, intersect, merge_boxes, to_box
from mindrlhf.weights.publish.sums import sum_bits
from mindrlhf.weights.publish.sync import Contribution, Piece, regions_of


def merge_needs(workers: Iterable[Mapping[str, Sequence | None]]) -> dict[str, list[Box] | None]:
    """Return what some workers read together: disjoint boxes by tensor, None for all of it.

    Args:
        workers: of each, by tensor, the boxes it reads (lists where they came from another process), None for all.
    """
    boxes: dict[str, set[Box]] = {}
    whole = set()
    for needs in workers:
        for name, read in needs.items():
            boxes.setdefault(name, set()).update(map(to_box, read or ()))
            if read is None:
                whole.add(name)
    return {name: None if name in whole else merge_boxes(read) for name, read in boxes.items()}


def sum_parts(
    board: WeightBoard, pieces: Sequence[Piece], node: int, written: Contribution
) -> dict[tuple[str, Box], int]:
    """Return the sums of the bits of all parts of regions that a node is the first to send.

    Args:
        board: of this node, after all of its ranks have written.
        pieces: of all nodes.
        written: what the ranks of this node wrote; regions that travel as they were written need no other sum.

    Raises:
        RunFailure: a region of which a part is to be sent is not as it was written.
    """
    regions = regions_of(written)
    parts_of: dict[str, set[Box]] = {}
    for piece in pieces:
        if piece.nodes[0] == node and (piece.name, piece.region) not in regions:
            parts_of.setdefault(piece.name, set()).add(piece.region)
    sums = {
        (name, part): sum_bits(board.view(name, part)) for name, parts in parts_of.items() for part in sorted(parts)
    }
    for (name, region), checksum in regions.items():
        own = [part for part in parts_of.get(name, ()) if intersect(part, region)]
        if own:
            rest = [box for box, groups in divide({"all": [region], "sent": own}) if groups == ("all",)]
            total = sum(sums[name, part] for part in own) + sum(sum_bits(board.view(name, box)) for box in rest)
            if (total - checksum) % (1 << 8 * board.view(name, region).itemsize):
                raise RunFailure(f"tensor '{name}' changed on node {node} after it was written: {region}")
    return sums
