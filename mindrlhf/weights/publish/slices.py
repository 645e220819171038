"""Slices of tensors: what they have in common, what several cover together, and the sums of their bits.

A slice is (start, stop) per axis. By the sums, what was written is compared with what lies in memory elsewhere.

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from mindrlhf.weights.tensors import convert_dtype, dtype_name

TensorSlice = tuple[tuple[int, int], ...]
# What readers read, disjoint slices by tensor; None is all of it, and a tensor that is not there is not read.
RequiredSlices = Mapping[str, Sequence[TensorSlice] | None]

# Memory is copied, summed and sent in chunks, so that what comes next finds the chunk in the cache.
_CHUNK_BYTES = 1 << 20


def to_slice(bounds: Sequence[Sequence[int]]) -> TensorSlice:
    """Return bounds, lists where they came from another process, as a slice."""
    return tuple((int(start), int(stop)) for start, stop in bounds)


def to_index(bounds: Sequence[Sequence[int]]) -> tuple:
    """Return the index of a slice in an array; the ellipsis keeps what has no axes a view."""
    return (*(slice(start, stop) for start, stop in bounds), ...)


def whole_slice(shape: Sequence[int]) -> TensorSlice:
    """Return the slice that is a whole tensor."""
    return tuple((0, size) for size in shape)


def num_elements(one: TensorSlice) -> int:
    """Return the size of a slice; that of a scalar, which has no axes, is 1."""
    return math.prod(stop - start for start, stop in one)


def intersect(one: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """Return what two slices of one tensor have in common, None where that is nothing."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def slices_within(slices: Iterable[TensorSlice], frame: TensorSlice) -> list[TensorSlice]:
    """Return what of some slices lies in another."""
    return [part for one in slices if (part := intersect(one, frame)) is not None]


def first_missing(held: Sequence[TensorSlice], required: Iterable[TensorSlice]) -> TensorSlice | None:
    """Return the first required slice that disjoint slices do not cover, None where they cover all."""
    for one in required:
        if sum(map(num_elements, slices_within(held, one))) < num_elements(one):
            return one
    return None


def merge_slices(slices: Iterable[TensorSlice]) -> list[TensorSlice]:
    """Return disjoint slices, none empty, that cover what the given ones do, which may overlap and repeat."""
    # In order: what reads and plans is the same for the same slices, however they were listed.
    distinct = sorted({one for one in slices if num_elements(one)})
    if len(distinct) < 2:
        return distinct
    return [one for one, _ in divide({"": distinct})]


def merge_required(readers: Iterable[Mapping[str, Sequence | None]]) -> dict[str, list[TensorSlice] | None]:
    """Return what some readers read together.

    Args:
        readers: :data:`RequiredSlices` of each, whose slices may be lists, as they come from another process.
    """
    slices: dict[str, set[TensorSlice]] = {}
    whole = set()
    for required in readers:
        for name, read in required.items():
            slices.setdefault(name, set()).update(map(to_slice, read or ()))
            if read is None:
                whole.add(name)
    return {name: None if name in whole else merge_slices(read) for name, read in slices.items()}


def divide(groups: Mapping[Hashable, Sequence[TensorSlice]]) -> list[tuple[TensorSlice, tuple[Hashable, ...]]]:
    """Divide what groups of slices cover into disjoint slices, each with the groups that cover it, all of it.

    Args:
        groups: slices of one tensor, by any name; those of a group may overlap.
    """
    named = [(name, one) for name, slices in groups.items() for one in slices]
    if not named:
        return []
    num_axes = len(named[0][1])
    edges = [sorted({edge for _, one in named for edge in one[axis]}) for axis in range(num_axes)]
    places = [{edge: place for place, edge in enumerate(own)} for own in edges]
    covered: dict[tuple[int, ...], dict[Hashable, None]] = {}  # by cell of the grid of all edges
    for name, one in named:
        ranges = [range(place[start], place[stop]) for place, (start, stop) in zip(places, one)]
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


def _join(cells: Mapping[TensorSlice, tuple], axis: int) -> dict[TensorSlice, tuple]:
    """Join slices that are neighbours along an axis, alike along the others, and of the same groups."""

    def others(one: TensorSlice) -> TensorSlice:
        return (*one[:axis], *one[axis + 1 :])

    joined: dict[TensorSlice, tuple] = {}
    last: TensorSlice | None = None
    for cell in sorted(cells, key=lambda one: (others(one), one[axis])):
        names = cells[cell]
        touches = last is not None and others(last) == others(cell) and last[axis][1] == cell[axis][0]
        if touches and joined[last] == names:
            del joined[last]
            cell = (*cell[:axis], (last[axis][0], cell[axis][1]), *cell[axis + 1 :])
        joined[cell] = names
        last = cell
    return joined


def chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Cut an array into views that fit the cache: one that lies in one piece anywhere, else along its first axis."""
    array = array.reshape(-1) if array.flags.c_contiguous else array
    return (array[rows] for rows in _chunk_rows(array))


def sum_bits(array: np.ndarray) -> int:
    """Return the sum of the elements' bits, modulo the width of an element."""
    words = array.view(f"<u{array.dtype.itemsize}")
    return int(np.add.reduce(words, axis=None, dtype=words.dtype))


def sum_chunks(array: np.ndarray) -> int:
    """Return the sum of the bits of an array of any size, not yet modulo the width of an element."""
    return sum(map(sum_bits, chunks(array)))


def copy_and_sum(target: np.ndarray, source: np.ndarray, dtype: str) -> int:
    """Copy float32, or what has the dtype of ``target``, given by name, and return the sum of the bits there then.

    The sum is not yet modulo the width of an element.
    """
    if target.flags.c_contiguous and source.flags.c_contiguous:
        target, source = target.reshape(-1), source.reshape(-1)
    is_other, checksum = source.dtype != target.dtype, 0
    for rows in _chunk_rows(source):
        chunk = convert_dtype(source[rows], dtype_name(source), dtype) if is_other else source[rows]
        np.copyto(target[rows], chunk)
        checksum += sum_bits(target[rows])
    return checksum


def _chunk_rows(array: np.ndarray) -> Iterator[slice]:
    """Cut an array along its first axis into chunks that fit the cache."""
    if array.size:
        num_rows = max(1, _CHUNK_BYTES // (array.nbytes // len(array)))
        for start in range(0, len(array), num_rows):
            yield slice(start, start + num_rows)
