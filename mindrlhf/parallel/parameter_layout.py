"""How one parameter lies on the ranks: which slice each holds, in MindSpore's terms, in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter lies on the ranks.

    Attributes:
        name: MindFormers (mcore) name.
        shape: of the whole parameter.
        stages: pipeline stages that hold it: one, or the first and the last for a tied embedding.
        device_matrix: axes of a stage's ranks.
        tensor_map: for each axis of the parameter the matrix axis that splits it, from the right; -1 for none, a tuple
            (outermost first) for several.
        optimizer_shard_size: ranks that share one repeated slice; 1 for none.
    """

    name: str
    shape: tuple[int, ...]
    stages: tuple[int, ...]
    device_matrix: tuple[int, ...]
    tensor_map: tuple[int | tuple[int, ...], ...]
    optimizer_shard_size: int = 1

    @cached_property
    def stage_size(self) -> int:
        return math.prod(self.device_matrix)

    @cached_property
    def splits(self) -> tuple[int, ...]:
        """Parts of each axis, without the optimiser shard."""
        return tuple(math.prod(self.device_matrix[axis] for axis in axes) for axes in self._axes)

    @cached_property
    def num_repeats(self) -> int:
        """Ranks of a stage that hold the same slice before the optimiser shard."""
        return self.stage_size // math.prod(self.splits)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold each slice, over all stages."""
        return self.num_repeats // self.optimizer_shard_size * len(self.stages)

    @cached_property
    def optimizer_shard_step(self) -> int:
        """Distance of neighbours in an optimiser-shard group; 0 when there is none."""
        if self.optimizer_shard_size == 1:
            return 0
        innermost = max(axis for axis in self._repeated_axes if self.device_matrix[axis] > 1)
        return math.prod(self.device_matrix[innermost + 1 :])

    @cached_property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of the slice of every rank that holds the parameter."""
        shape = [size // parts for size, parts in zip(self.shape, self.splits)]
        if self.optimizer_shard_size > 1:
            shape[0] //= self.optimizer_shard_size
        return tuple(shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold a slice."""
        return tuple(
            rank for stage in self.stages for rank in range(stage * self.stage_size, (stage + 1) * self.stage_size)
        )

    def slice_of(self, rank: int) -> tuple[slice, ...]:
        """The part of the whole parameter that ``rank`` holds: one slice with start and stop per axis."""
        assert rank // self.stage_size in self.stages, f"rank {rank} holds no slice of {self.name}"
        return self._slices[rank % self.stage_size]

    def replicas(self) -> dict[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """The ranks that hold each slice, by the slice's (start, stop) per axis."""
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in self.ranks:
            box = tuple((part.start, part.stop) for part in self.slice_of(rank))
            holders.setdefault(box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in holders.items()}

    def writers(self) -> tuple[int, ...]:
        """One rank per slice, the lowest: together they hold each element exactly once."""
        return tuple(ranks[0] for ranks in self.replicas().values())

    @cached_property
    def _axes(self) -> tuple[tuple[int, ...], ...]:
        """Matrix axes (from the left) that split each axis of the parameter."""
        last = len(self.device_matrix) - 1
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in self.tensor_map]
        return tuple(tuple(last - axis for axis in entry if axis != -1) for entry in entries)

    @cached_property
    def _repeated_axes(self) -> tuple[int, ...]:
        used = {axis for axes in self._axes for axis in axes}
        return tuple(axis for axis in range(len(self.device_matrix)) if axis not in used)

    @cached_property
    def _slices(self) -> tuple[tuple[slice, ...], ...]:
        """The slice of each rank of a stage."""
        return tuple(self._slice_of_device(device) for device in range(self.stage_size))

    def _slice_of_device(self, device: int) -> tuple[slice, ...]:
        position = mixed_radix(device, self.device_matrix)
        slices = []
        for size, parts, axes in zip(self.shape, self.splits, self._axes):
            index = flat_index([position[axis] for axis in axes], [self.device_matrix[axis] for axis in axes])
            width = size // parts
            slices.append(slice(index * width, (index + 1) * width))
        if self.optimizer_shard_size > 1:
            repeated = self._repeated_axes
            repeat = flat_index([position[axis] for axis in repeated], [self.device_matrix[axis] for axis in repeated])
            width = self.slice_shape[0]
            start = slices[0].start + repeat % self.optimizer_shard_size * width
            slices[0] = slice(start, start + width)
        return tuple(slices)


def mixed_radix(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Mixed-radix digits of ``index``, last innermost."""
    digits = []
    for size in reversed(sizes):
        index, digit = divmod(index, size)
        digits.append(digit)
    return tuple(reversed(digits))


def flat_index(digits: Sequence[int], sizes: Sequence[int]) -> int:
    """The inverse of `mixed_radix`."""
    index = 0
    for digit, size in zip(digits, sizes):
        index = index * size + digit
    return index
