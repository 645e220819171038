"""Packing: from scored samples to the micro-batches of every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mindrlhf.config.training import BY_LENGTH, FIRST_FIT, SHARED_PROMPTS
from mindrlhf.data.packing import PackedRows, Row, TokenSequence, fill_rows, first_positions, padding_rows, plan_rows
from mindrlhf.layout.packing import Piece, RowCost, cut, deal_rows, micro_batch_sizes, plan_best_fit
from mindrlhf.system.records import record
from mindrlhf.training.routing.rows import ReplayedExperts, with_experts

if TYPE_CHECKING:
    from mindrlhf.training.vision.image_rows import ImageTokens

T = TypeVar("T")


@dataclass(frozen=True)
class RowOptions:
    """Options of packing sequences into micro-batches."""

    row_lengths: tuple[int, ...]  # ascending
    rows_per_micro_batch: int  # at most, where micro-batches have several sizes
    num_ranks: int
    pack: bool
    packing: str = FIRST_FIT  # see `training.packing`
    cost: RowCost = RowCost()  # by which the rows of other packings are balanced over the ranks
    in_step: bool = False  # ranks compute one graph together: their n-th micro-batches must have the same shape
    image_tokens: "ImageTokens | None" = None  # of a model with vision
    experts: ReplayedExperts | None = None  # where the generator's routing is replayed

    @property
    def shares_prompts(self) -> bool:
        """True if the samples of a group have their prompt once in a row."""
        return self.packing == SHARED_PROMPTS

    @property
    def sizes(self) -> tuple[int, ...]:
        """The row counts that micro-batches may have, descending."""
        is_one = self.packing in BY_LENGTH or self.in_step
        return (self.rows_per_micro_batch,) if is_one else micro_batch_sizes(self.rows_per_micro_batch)

    def shapes(self) -> list[PackedRows]:
        """Return rows of weight 0 in each shape that micro-batches may have: what there is to compile."""
        return [
            self.dressed(padding_rows((size, length), share_prompts=self.shares_prompts), (), ())
            for length in self.row_lengths
            for size in self.sizes
        ]

    def plan_first_fit(self, sequences: Sequence[TokenSequence]) -> list[Row]:
        """Return rows that take sequences as they come, by length alone."""
        return plan_rows([sequence.num_tokens for sequence in sequences], self.row_lengths, pack=self.pack)

    def plan_best_fit(self, sequences: Sequence[TokenSequence]) -> list[Row]:
        """Return rows for the packings that make fuller ones."""
        return plan_best_fit(pieces_of(sequences, self.shares_prompts), self.row_lengths, self.cost)

    def dressed(self, packed: PackedRows, sequences: Sequence[TokenSequence], rows: Sequence[Row]) -> PackedRows:
        """Return what `fill_rows` made of ``rows`` with what the model reads beside tokens."""
        if self.image_tokens is not None:
            from mindrlhf.training.vision.image_rows import with_images

            packed = with_images(packed, sequences, rows, self.image_tokens)
        return with_experts(packed, sequences, rows, self.experts, share_prompts=self.shares_prompts)


@record
@dataclass(frozen=True)
class Batch:
    """The rows of one optimiser update, cut into micro-batches that the ranks divide; or the part of one rank.

    Nothing depends on the cutting: the loss divides by ``num_tokens``, the generated tokens of the whole update.
    Samples without a gradient may have been left out of the rows; their tokens count.
    """

    micro_batches: tuple[PackedRows, ...]
    num_tokens: int
    placed: tuple[tuple[int, ...], ...] = ()  # per sequence: micro-batch, row, first position, last + 1
    ranks: tuple[int, ...] = ()  # of each micro-batch; empty: rank r computes ``micro_batches[r::num_ranks]``
    images: dict[str, np.ndarray] = field(default_factory=dict)  # digest -> uint8 [height, width, 3]
    counts: tuple[int, ...] = ()  # of the sequences of each sample; empty: one each

    @property
    def num_samples(self) -> int:
        """The samples that are in the rows."""
        return len(self.counts) or len(self.placed)

    @property
    def num_computed(self) -> int:
        """The generated tokens that are in the rows."""
        return sum(int((rows.mask > 0).sum()) for rows in self.micro_batches)

    def numbers(self, rank: int, num_ranks: int) -> list[int]:
        """Return the numbers of the micro-batches that a rank computes, in order."""
        if not self.ranks:
            return list(range(rank, len(self.micro_batches), num_ranks))
        return [number for number, owner in enumerate(self.ranks) if owner == rank]

    def part_of(self, rank: int, num_ranks: int) -> "Batch":
        """Return what a rank computes: its micro-batches, to which it may add token arrays, and their images."""
        own = [self.micro_batches[number] for number in self.numbers(rank, num_ranks)]
        digests = dict.fromkeys(digest for rows in own for digest in rows.images)
        return Batch(
            tuple(replace(rows, tokens=dict(rows.tokens)) for rows in own),
            self.num_tokens,
            images={digest: self.images[digest] for digest in digests},
        )

    def per_rank(self, num_ranks: int) -> list[dict[str, "Batch"]]:
        """Return the argument ``batch`` of a call to the ranks, by rank."""
        return [{"batch": self.part_of(rank, num_ranks)} for rank in range(num_ranks)]

    def collect(self, shares: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Gather per-position results of all ranks back into one array for each sample: of its generated tokens.

        Args:
            shares: by rank, [rows, length] for each of its micro-batches.
        """
        return self.responses(self.in_order(shares))

    def responses(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one array for each sample, of its generated tokens, from [rows, length] for each micro-batch."""
        found = [
            arrays[index][row, first:stop][self.micro_batches[index].mask[row, first:stop] > 0]
            for index, row, first, stop in self.placed
        ]
        if not self.counts:
            return found
        rest = iter(found)
        return [np.concatenate([next(rest) for _ in range(count)]) for count in self.counts]

    def spread(self, responses: Sequence[np.ndarray], num_ranks: int) -> list[list[np.ndarray]]:
        """Lay one array per sample, of its generated tokens, out over the rows: the inverse of ``collect``.

        Returns:
            By rank, float32 [rows, length] for each of its micro-batches.
        """
        arrays = [np.zeros_like(rows.mask) for rows in self.micro_batches]
        assert len(responses) == self.num_samples, f"{len(responses)} arrays for {self.num_samples} samples"
        start, values = 0, np.concatenate([*responses, np.zeros(0)])
        for micro_batch, row, first, stop in self.placed:
            is_generated = self.micro_batches[micro_batch].mask[row, first:stop] > 0
            end = start + int(is_generated.sum())
            arrays[micro_batch][row, first:stop][is_generated] = values[start:end]
            start = end
        assert start == len(values), f"{len(values)} values for {start} generated tokens"
        return [[arrays[number] for number in self.numbers(rank, num_ranks)] for rank in range(num_ranks)]

    def in_order(self, shares: Sequence[Sequence[T]]) -> list[T]:
        """Return what the ranks have for their micro-batches in the order of the batch."""
        found: dict[int, T] = {}
        for rank, share in enumerate(shares):
            found |= zip(self.numbers(rank, len(shares)), share, strict=True)
        return [found[number] for number in range(len(self.micro_batches))]


def parts_of_step(batches: Sequence[Batch], num_ranks: int) -> list[dict[str, list[Batch]]]:
    """Return the argument ``batches`` of a call to the ranks: their parts of a step's updates, every image once."""
    parts = []
    for rank in range(num_ranks):
        own, sent = [], set()
        for part in (batch.part_of(rank, num_ranks) for batch in batches):
            own.append(replace(part, images={name: image for name, image in part.images.items() if name not in sent}))
            sent |= part.images.keys()
        parts.append({"batches": own})
    return parts


def make_update_batch(samples: Sequence[Sequence[TokenSequence]], computed: np.ndarray, options: RowOptions) -> Batch:
    """Make the batch of an update of the sequences of ``samples``, with rows for those that are ``computed``, bool
    [samples]."""
    chosen = [one for one, is_computed in zip(samples, computed, strict=True) if is_computed]
    counts = tuple(map(len, chosen))
    batch = make_batch([sequence for one in chosen for sequence in one], options)
    num_tokens = sum(sequence.num_generated for one in samples for sequence in one)
    return replace(batch, num_tokens=num_tokens, counts=counts if max(counts) > 1 else ())


def make_batch(sequences: Sequence[TokenSequence], options: RowOptions) -> Batch:
    """Pack sequences into rows and these into micro-batches, as ``options.packing`` says.

    first_fit gives all micro-batches one size: padding rows (weight 0) fill the last ones. The others balance the cost
    of the ranks; which sequences share a row does not depend on the number of ranks.
    """
    if options.packing in BY_LENGTH:
        return batch_of_rows(sequences, options.plan_first_fit(sequences), options)
    rows = options.plan_best_fit(sequences)
    builder = _Builder(sequences, options)
    costs = [options.cost.of(row.length, sum(sequences[item].num_generated for item in row.items)) for row in rows]
    if options.in_step:
        _add_in_step(builder, rows, costs)
    else:
        for rank, dealt in enumerate(deal_rows(costs, options.num_ranks)):
            for length in options.row_lengths:
                own = [rows[number] for number in dealt if rows[number].length == length]
                for size in cut(len(own), options.sizes):
                    builder.add(own[:size], length, size, rank)
                    own = own[size:]
    return builder.batch()


def pieces_of(sequences: Sequence[TokenSequence], share_prompts: bool) -> list[Piece]:
    """Return what each sequence takes in a row; see :class:`mindrlhf.data.packing.PackedRows`."""
    if not share_prompts:
        return [Piece(sequence.num_tokens, group=number) for number, sequence in enumerate(sequences)]
    groups: dict[bytes, int] = {}
    numbers = [groups.setdefault(sequence.prompt_key, len(groups)) for sequence in sequences]
    return [
        Piece(len(sequence.response_ids), len(sequence.prompt_ids) - 1, number)
        for sequence, number in zip(sequences, numbers)
    ]


def _add_in_step(builder: "_Builder", rows: Sequence[Row], costs: Sequence[float]) -> None:
    options = builder.options
    (size,) = options.sizes
    for length in options.row_lengths:
        bucket = [number for number, row in enumerate(rows) if row.length == length]
        most = -(-len(bucket) // options.num_ranks)
        dealt = deal_rows([costs[number] for number in bucket], options.num_ranks, most=most)
        for start in range(0, most, size):
            for rank, places in enumerate(dealt):
                builder.add([rows[bucket[place]] for place in places[start : start + size]], length, size, rank)


def batch_of_rows(sequences: Sequence[TokenSequence], rows: Sequence[Row], options: RowOptions) -> Batch:
    """Make a batch of planned rows, in micro-batches of one size; ``rows`` may hold only some of the sequences."""
    size = options.rows_per_micro_batch
    builder = _Builder(sequences, options)
    for length in options.row_lengths:
        bucket = [row for row in rows if row.length == length]
        for start in range(0, len(bucket), size):
            builder.add(bucket[start : start + size], length, size)
        while options.in_step and len(builder.micro_batches) % options.num_ranks:
            builder.add([], length, size)
    while len(builder.micro_batches) % options.num_ranks:
        builder.add([], builder.micro_batches[-1].mask.shape[1], size)
    return builder.batch()


class _Builder:
    """The micro-batches of a batch as they are added."""

    def __init__(self, sequences: Sequence[TokenSequence], options: RowOptions):
        self.options = options
        self.micro_batches: list[PackedRows] = []
        self._sequences = sequences
        self._ranks: list[int] = []
        self._placed: dict[int, tuple[int, int, int, int]] = {}

    def add(self, rows: Sequence[Row], length: int, size: int, rank: int | None = None) -> None:
        """Add a micro-batch of ``size`` rows of ``length``, of which those beyond ``rows`` are padding."""
        shared = self.options.shares_prompts
        for row_index, row in enumerate(rows):
            for item, first in first_positions(self._sequences, row, share_prompts=shared):
                stop = first + len(self._sequences[item].response_ids)
                self._placed[item] = (len(self.micro_batches), row_index, first, stop)
        if rows:
            filled = fill_rows(self._sequences, rows, size, share_prompts=shared)
            self.micro_batches.append(self.options.dressed(filled, self._sequences, rows))
        else:
            names = tuple(self._sequences[0].values)
            padding = padding_rows((size, length), names, share_prompts=shared)
            self.micro_batches.append(self.options.dressed(padding, (), ()))
        if rank is not None:
            self._ranks.append(rank)

    def batch(self) -> Batch:
        """Return the batch."""
        num_tokens = sum(self._sequences[item].num_generated for item in self._placed)
        placed = tuple(self._placed[item] for item in sorted(self._placed))
        images = {}
        if self.options.image_tokens is not None:
            from mindrlhf.training.vision.image_rows import image_table

            images = image_table([self._sequences[item] for item in sorted(self._placed)])
        return Batch(tuple(self.micro_batches), num_tokens, placed, tuple(self._ranks), images)


record(PackedRows)
