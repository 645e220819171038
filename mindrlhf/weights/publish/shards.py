"""Plans of the parts of logical tensors that each rank writes to the weight buffer.

A shard of a fused MindFormers parameter is a handful of slices of Hugging Face tensors, so every rank writes what it
holds where it belongs, without a gather: between them the ranks move each byte exactly once, the least that
any transfer can do. Of several ranks that hold the same shard, the one with the least to write so far does it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.specs import ModelDims, ParameterRule
from mindrlhf.specs.fuse import fuse
from mindrlhf.weights.publish.buffer import WeightBuffer


@dataclass(frozen=True)
class PublishedShard:
    """A part of a rank's shard and its place.

    Attributes:
        hf_name: the logical tensor.
        rows: what to take of the rank's shard along its first axis.
        index: where it lies in the logical tensor.
        columns: what to take of those rows, to be transposed; None for all of it as it is.
    """

    hf_name: str
    rows: slice | np.ndarray
    index: tuple[slice, ...]
    columns: slice | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(one.stop - one.start for one in self.index)

    def cut(self, shard: Any) -> Any:
        """Return the part of the rank's shard, an array or a tensor, as it lies there."""
        takes_rows = isinstance(self.rows, slice) or isinstance(shard, np.ndarray)
        rows = self.rows if takes_rows else self.rows.tolist()
        return shard[rows] if self.columns is None else shard[rows, self.columns]

    def of(self, shard: np.ndarray) -> np.ndarray:
        """Return the part as it lies in the logical tensor."""
        part = self.cut(shard)
        return part if self.columns is None else part.T


def plan_publication(
    layouts: Sequence[ParameterLayout],
    rules: Mapping[str, ParameterRule],
    dims: ModelDims,
    rank: int,
    ranks: Sequence[int] | None = None,
) -> dict[str, list[PublishedShard]]:
    """Return what ``rank`` writes, by MindFormers name; the plans of all ranks cover each element exactly once.

    ``ranks`` are those that share its buffer, None for all; see :func:`choose_writers`.
    """
    writers = choose_writers(layouts, ranks)
    return {
        layout.name: published_shards(rules[layout.name], dims, layout.shard_of(rank))
        for layout in layouts
        if rank in writers[layout.name]
    }


def choose_writers(
    layouts: Sequence[ParameterLayout], among: Sequence[int] | None = None
) -> dict[str, tuple[int, ...]]:
    """The ranks that write each parameter, one per distinct shard; largest parameters first, to even out the load.

    Args:
        among: the ranks of one node, whose buffer gets from other nodes what none of them holds; None for all ranks.
    """
    loads: dict[int, int] = {}
    writers = {}
    for layout in sorted(layouts, key=lambda layout: -np.prod(layout.shard_shape)):
        chosen = []
        for holders in layout.replicas().values():
            ranks = [rank for rank in holders if among is None or rank in among]
            if not ranks:
                continue
            writer = min(ranks, key=lambda rank: (loads.get(rank, 0), rank))
            loads[writer] = loads.get(writer, 0) + int(np.prod(layout.shard_shape))
            chosen.append(writer)
        writers[layout.name] = tuple(chosen)
    return writers


def published_shards(rule: ParameterRule, dims: ModelDims, held: tuple[slice, ...]) -> list[PublishedShard]:
    """The parts of the logical tensors that lie in the shard ``held`` of a fused parameter, each of rows in a row.

    Fusing permutes whole rows, so row numbers sent through it tell where each row came from; but for experts, which it
    transposes.
    """
    if "expert" in rule.transform:
        return list(_expert_shards(rule, dims, *held))
    num_rows = [shape[0] for shape in rule.shape(dims)]
    sources = fuse(rule, dims, [np.full(count, part) for part, count in enumerate(num_rows)])[held[0]]
    origins = fuse(rule, dims, [np.arange(count) for count in num_rows])[held[0]]
    shards = []
    for part, hf_name in enumerate(rule.hf_names):
        (rows,) = np.nonzero(sources == part)
        rows = rows[np.argsort(origins[rows])]
        is_apart = (np.diff(origins[rows]) != 1) | (np.diff(rows) < 0)
        for run in np.split(rows, np.nonzero(is_apart)[0] + 1) if len(rows) else ():
            first = int(origins[run[0]])
            shards.append(PublishedShard(hf_name, _as_slice(run), (slice(first, first + len(run)), *held[1:])))
    return shards


def _expert_shards(rule: ParameterRule, dims: ModelDims, rows: slice, columns: slice) -> Iterator[PublishedShard]:
    """Yield the parts of experts: transposed, those of one beside each other, one expert below the other."""
    per_expert = len(rule.hf_names) // rule.num_experts
    shapes = rule.shape(dims)[:per_expert]
    height = shapes[0][1]
    for expert in range(rows.start // height, -(-rows.stop // height)):
        above = expert * height
        top, bottom = max(rows.start, above), min(rows.stop, above + height)
        left = 0
        for part, (width, _) in enumerate(shapes):
            first, last = max(columns.start, left), min(columns.stop, left + width)
            if first < last:
                yield PublishedShard(
                    rule.hf_names[expert * per_expert + part],
                    slice(top - rows.start, bottom - rows.start),
                    (slice(first - left, last - left), slice(top - above, bottom - above)),
                    slice(first - columns.start, last - columns.start),
                )
            left += width


def wanted_shards(
    publication: Mapping[str, Sequence[PublishedShard]], buffer: WeightBuffer
) -> dict[str, list[PublishedShard]]:
    """Parts of a publication in the bucket that is being written, by MindFormers name."""
    wanted = {name: [part for part in parts if buffer.wants(part.hf_name)] for name, parts in publication.items()}
    return {name: parts for name, parts in wanted.items() if parts}


def write_shards(
    buffer: WeightBuffer, publication: Mapping[str, Sequence[PublishedShard]], arrays: Mapping[str, np.ndarray]
) -> int:
    """Write the planned parts of a rank's shards, ``arrays`` by MindFormers name, to the buffer; return the bytes."""
    written_bytes = 0
    for name, parts in publication.items():
        for part in parts:
            array = part.of(arrays[name])
            buffer.write(part.hf_name, array, part.index)
            written_bytes += array.nbytes
    return written_bytes


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    """Evenly spaced rows as a slice, which copies nothing."""
    steps = np.unique(np.diff(rows))
    if len(steps) > 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1, int(steps[0]) if len(steps) else 1)
