"""Layout of one parameter: the shard of each rank, in MindSpore's terms, in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# A file that asks for more is damaged; lists as long as the number of ranks are made from what it says.
MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class ParameterLayout:
    """Layout of one parameter on the ranks.

    Attributes:
        name: MindFormers (mcore) name.
        shape: of the whole parameter.
        stages: pipeline stages that hold it: one, or the first and the last for a tied embedding.
        device_matrix: axes of a stage's ranks.
        tensor_map: for each axis of the parameter the matrix axis that splits it, from the right; -1 for none, a tuple
            (outermost first) for several.
        optimizer_shard_size: ranks that share one repeated shard; 1 for none.
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
        """Ranks of a stage that hold the same shard before the optimiser shard."""
        return self.stage_size // math.prod(self.splits)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold each shard, over all stages."""
        return self.num_repeats // self.optimizer_shard_size * len(self.stages)

    @cached_property
    def optimizer_shard_step(self) -> int:
        """Distance of neighbours in an optimiser-shard group; 0 when there is none."""
        if self.optimizer_shard_size == 1:
            return 0
        innermost = max(axis for axis in self._repeated_axes if self.device_matrix[axis] > 1)
        return math.prod(self.device_matrix[innermost + 1 :])

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the shard of every rank that holds the parameter."""
        shape = [size // parts for size, parts in zip(self.shape, self.splits)]
        if self.optimizer_shard_size > 1:
            shape[0] //= self.optimizer_shard_size
        return tuple(shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold a shard."""
        return tuple(
            rank for stage in self.stages for rank in range(stage * self.stage_size, (stage + 1) * self.stage_size)
        )

    def shard_of(self, rank: int) -> tuple[slice, ...]:
        """The shard of ``rank`` as a place in the whole parameter: one Python slice with start and stop per axis."""
        assert rank // self.stage_size in self.stages, f"rank {rank} holds no shard of {self.name}"
        return self._shards[rank % self.stage_size]

    def replicas(self) -> dict[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """The ranks that hold each shard, by the shard's (start, stop) per axis."""
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in self.ranks:
            box = tuple((part.start, part.stop) for part in self.shard_of(rank))
            holders.setdefault(box, []).append(rank)
        return {box: tuple(ranks) for box, ranks in holders.items()}

    def writers(self) -> tuple[int, ...]:
        """One rank per shard, the lowest: together they hold each element exactly once."""
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
    def _shards(self) -> tuple[tuple[slice, ...], ...]:
        """The shard of each rank of a stage."""
        return tuple(self._shard_of_device(device) for device in range(self.stage_size))

    def _shard_of_device(self, device: int) -> tuple[slice, ...]:
        position = mixed_radix(device, self.device_matrix)
        slices = []
        for size, parts, axes in zip(self.shape, self.splits, self._axes):
            index = flat_index([position[axis] for axis in axes], [self.device_matrix[axis] for axis in axes])
            width = size // parts
            slices.append(slice(index * width, (index + 1) * width))
        if self.optimizer_shard_size > 1:
            repeated = self._repeated_axes
            repeat = flat_index([position[axis] for axis in repeated], [self.device_matrix[axis] for axis in repeated])
            width = self.shard_shape[0]
            start = slices[0].start + repeat % self.optimizer_shard_size * width
            slices[0] = slice(start, start + width)
        return tuple(slices)


def check_layout(layout: ParameterLayout) -> None:
    """Check a layout that was read from a file: whether its parts are of the right types and split the shape evenly.

    Raises:
        ValueError: naming what is wrong.
    """
    name, matrix = layout.name, layout.device_matrix
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in layout.tensor_map]
    axes = [axis for entry in entries for axis in entry]
    numbers = (*layout.shape, *layout.stages, *matrix, *axes, layout.optimizer_shard_size)
    if any(type(number) is not int for number in numbers):
        raise ValueError(f"{name} is described by something else than integers")
    used = [axis for axis in axes if axis != -1]
    is_cut = len(layout.tensor_map) == len(layout.shape) and len(set(used)) == len(used) and all(entries)
    if not is_cut or not all(0 <= axis < len(matrix) for axis in used) or any(size < 0 for size in layout.shape):
        raise ValueError(f"{name} is sharded along axes that it has not")
    if not matrix or min(matrix) < 1 or not layout.stages or min(layout.stages) < 0:
        raise ValueError(f"{name} lies on no ranks")
    if math.prod(matrix) * (max(layout.stages) + 1) > MAX_RANKS:
        raise ValueError(f"{name} lies on more than {MAX_RANKS} ranks")
    size = layout.optimizer_shard_size
    if any(length % parts for length, parts in zip(layout.shape, layout.splits)):
        raise ValueError(f"{name} does not divide by its device matrix")
    if size < 1 or layout.num_repeats % size or (size > 1 and not layout.shape):
        raise ValueError(f"{name} is shared by {size} optimiser ranks, of {layout.num_repeats} that repeat it")
    if size > 1 and (layout.shape[0] // layout.splits[0]) % size:
        raise ValueError(f"{name} does not divide among {size} optimiser ranks")


def gathered_ranks(layout: ParameterLayout, rank: int, block_rows: int) -> tuple[list[int], int]:
    """Return the ranks of a stage that together hold whole blocks, of which ``rank`` holds a part, and their number of
    columns of shards: those of the first column come first, from the top."""
    rows, columns = layout.splits[0], layout.splits[-1]
    shards = {one: layout.shard_of(layout.stages[0] * layout.stage_size + one) for one in range(layout.stage_size)}
    own = shards[rank]
    if columns == 1 and layout.shard_shape[0] % block_rows == 0:
        return [rank], 1
    height = layout.shape[0] // rows
    if columns > 1 or height % block_rows:
        top, bottom = 0, layout.shape[0]
    else:
        top = own[0].start // height * height
        bottom = top + height
    # Of ranks that hold the same shard one takes part, so that each takes part in one group.
    places: dict[tuple[int, int], list[int]] = {}
    for one, (part, beside) in shards.items():
        if top <= part.start < bottom:
            places.setdefault((beside.start, part.start), []).append(one)
    turn = places[own[1].start, own[0].start].index(rank)
    return [places[place][turn] for place in sorted(places)], columns


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
