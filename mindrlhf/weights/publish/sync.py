"""Which node sends which part of which tensor to which other.

The ranks of a node write what they hold to the board of their node. Where the model is cut over nodes, that board lacks
regions, which come from the boards of nodes that have them: each region along a chain, from one node to all that lack
it, so that no node sends more than the model once, however many nodes there are.

Where it is known what the servers of each node read (:mod:`mindrlhf.weights.publish.needs`), of each region only that
travels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindrlhf.errors import RunFailure
from mindrlhf.weights.publish.slices import Box, divide, num_elements, parts_within, to_box
from mindrlhf.weights.tensors import TensorInfo

# Large regions are cut, so that the nodes of a chain work at the same time, and so do several streams.
PIECE_BYTES = 8 << 20

Contribution = Mapping[str, Mapping[str, Any]]  # see :meth:`mindrlhf.weights.publish.buffer.WeightBoard.contribution`
Needs = Mapping[str, Sequence[Box] | None]  # by tensor; None is all of it, and one that is not there is not needed


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and its way.

    Attributes:
        name: of the tensor.
        region: what it is a piece of: a region that one rank wrote, or what some nodes need of one.
        box: what it covers of the tensor.
        nodes: the one that has it, and those that lack it in the order in which they get it, each from the one before.
    """

    name: str
    region: Box
    box: Box
    nodes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Size of the part."""
        return num_elements(self.box)


def regions_of(contribution: Contribution) -> dict[tuple[str, Box], int]:
    """Return the regions that were written, each with the sum of its bits."""
    return {
        (name, to_box(bounds)): checksum
        for name, written in contribution.items()
        for bounds, checksum in zip(written["regions"], written["sums"], strict=True)
    }


def plan_exchange(
    written: Sequence[Contribution], infos: Sequence[TensorInfo], needed: Sequence[Needs] | None = None
) -> list[Piece]:
    """Return the pieces that have to travel, in the order in which every node sends and receives them.

    Args:
        written: by node, what its ranks wrote to its board. Regions of two ranks are the same or disjoint.
        infos: the tensors of a board.
        needed: by node, what its servers read; None where every node gets everything.
    """
    element_bytes = {info.name: info.numpy_dtype.itemsize for info in infos}
    held = [regions_of(contribution) for contribution in written]
    sent_bytes = [0] * len(written)
    pieces = []
    for name, region in dict.fromkeys(key for regions in held for key in regions):
        holders = [node for node, regions in enumerate(held) if (name, region) in regions]
        for part, nodes in _lacking_parts(name, region, set(range(len(held))) - set(holders), needed):
            origin = min(holders, key=lambda node: (sent_bytes[node], node))
            # In a ring, so that few pairs of nodes talk to each other.
            others = sorted(nodes, key=lambda node: (node - origin) % len(held))
            size_bytes = element_bytes[name] * num_elements(part)
            for node in (origin, *others[:-1]):
                sent_bytes[node] += size_bytes
            pieces += [Piece(name, part, box, (origin, *others)) for box in _cut(part, size_bytes)]
    return pieces


def completed(written: Contribution, others: Sequence[Contribution]) -> dict[str, dict[str, Any]]:
    """Return what a node's ranks wrote and, where they wrote nothing, what those of the other nodes did."""
    regions = regions_of(written)
    for other in others:
        regions = {**regions_of(other), **regions}
    return _contribution(regions)


def with_received(written: Contribution, received: Mapping[tuple[str, Box], int]) -> dict[str, dict[str, Any]]:
    """Return what a node's ranks wrote and the regions that came, given with their sums."""
    return _contribution({**regions_of(written), **received})


def check_received(
    found: Mapping[tuple[str, Box], int],
    expected: Mapping[tuple[str, Box], int],
    infos: Sequence[TensorInfo],
    node: int,
) -> None:
    """Compare what lies in a node's memory now with what the writing ranks have summed.

    Args:
        found: the sums of the regions that came, over the node's memory.
        expected: those of all regions; see :func:`regions_of`.

    Raises:
        RunFailure: it differs, or something is missing; the message names node and tensor.
    """
    modulus = {info.name: 1 << (8 * info.numpy_dtype.itemsize) for info in infos}
    for (name, region), checksum in found.items():
        if (checksum - expected[name, region]) % modulus[name]:
            raise RunFailure(f"tensor '{name}' came to node {node} with other values than were written: {region}")


def _lacking_parts(
    name: str, region: Box, nodes: set[int], needed: Sequence[Needs] | None
) -> list[tuple[Box, Sequence[int]]]:
    """Return the parts of a region that some nodes, which lack it, have to get, each with these nodes."""
    if not nodes:
        return []
    if needed is None:
        return [(region, sorted(nodes))]
    boxes_of = {node: needed[node].get(name, ()) for node in sorted(nodes)}
    return divide(
        {node: [region] if boxes is None else parts_within(boxes, region) for node, boxes in boxes_of.items()}
    )


def _contribution(regions: Mapping[tuple[str, Box], int]) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for (name, box), checksum in regions.items():
        entry = entries.setdefault(name, {"regions": [], "sums": [], "checksum": 0})
        entry["regions"].append([list(bounds) for bounds in box])
        entry["sums"].append(checksum)
        entry["checksum"] = (entry["checksum"] + checksum) % 2**64
    return entries


def _cut(region: Box, size_bytes: int) -> list[Box]:
    if not region or size_bytes <= PIECE_BYTES:
        return [region]
    (start, stop), *others = region
    num_rows = max(1, (stop - start) * PIECE_BYTES // size_bytes)
    firsts = range(start, stop, num_rows)
    return [((first, min(first + num_rows, stop)), *others) for first in firsts]
