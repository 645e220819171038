"""Boxes of a tensor, (start, stop) per axis: what they have in common, and what several cover together.

Needs the standard library only: both interpreters (training and rollout) import it.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

Box = tuple[tuple[int, int], ...]


def to_box(bounds: Sequence[Sequence[int]]) -> Box:
    """Return bounds, lists where they came from another process, as a box."""
    return tuple((int(start), int(stop)) for start, stop in bounds)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def num_elements(box: Box) -> int:
    """Return the size of a box; that of a scalar, which has no axes, is 1."""
    return math.prod(stop - start for start, stop in box)


def intersect(box: Box, other: Box) -> Box | None:
    """Return what two boxes of one tensor have in common, None where that is nothing."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(box, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def parts_within(boxes: Iterable[Box], frame: Box) -> list[Box]:
    """Return what of some boxes lies in another."""
    return [part for box in boxes if (part := intersect(box, frame)) is not None]


def first_lacking(held: Sequence[Box], needed: Iterable[Box]) -> Box | None:
    """Return the first needed box that disjoint boxes do not cover, None where they cover all."""
    for box in needed:
        if sum(map(num_elements, parts_within(held, box))) < num_elements(box):
            return box
    return None


def merge_boxes(boxes: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that cover what the given ones do, which may overlap and repeat; empty ones are dropped."""
    # Boxes in order: what reads and plans is the same for the same needs, however they were listed.
    distinct = sorted({box for box in boxes if num_elements(box)})
    if len(distinct) < 2:
        return distinct
    return [box for box, _ in divide({"": distinct})]


def divide(groups: Mapping[Hashable, Sequence[Box]]) -> list[tuple[Box, tuple[Hashable, ...]]]:
    """Divide what groups of boxes cover into disjoint boxes, each with the groups that cover it, all of it.

    Args:
        groups: boxes of one tensor, by any name; those of a group may overlap.
    """
    named = [(name, box) for name, boxes in groups.items() for box in boxes]
    if not named:
        return []
    num_axes = len(named[0][1])
    edges = [sorted({edge for _, box in named for edge in box[axis]}) for axis in range(num_axes)]
    places = [{edge: place for place, edge in enumerate(own)} for own in edges]
    covered: dict[tuple[int, ...], dict[Hashable, None]] = {}  # by cell of the grid of all edges
    for name, box in named:
        ranges = [range(place[start], place[stop]) for place, (start, stop) in zip(places, box)]
        for cell in itertools.product(*ranges):
            covered.setdefault(cell, {})[name] = None
    # The groups of each cell stand in the order of ``groups``, so equal ones are equal tuples.
    cells = {tuple((place, place + 1) for place in cell): tuple(names) for cell, names in covered.items()}
    for axis in reversed(range(num_axes)):
        cells = _join(cells, axis)
    return [
        (tuple((edges[axis][start], edges[axis][stop]) for axis, (start, stop) in enumerate(cell)), names)
        for cell, names in sorted(cells.items())
    ]


def _join(cells: Mapping[Box, tuple], axis: int) -> dict[Box, tuple]:
    """Join boxes that are neighbours along an axis, alike along the others, and of the same groups."""

    def others(box: Box) -> Box:
        return (*box[:axis], *box[axis + 1 :])

    joined: dict[Box, tuple] = {}
    last: Box | None = None
    for cell in sorted(cells, key=lambda box: (others(box), box[axis])):
        names = cells[cell]
        touches = last is not None and others(last) == others(cell) and last[axis][1] == cell[axis][0]
        if touches and joined[last] == names:
            del joined[last]
            cell = (*cell[:axis], (last[axis][0], cell[axis][1]), *cell[axis + 1 :])
        joined[cell] = names
        last = cell
    return joined
