"""From scored samples to the micro-batches of every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from mindrlhf.data.packing import PackedRows, Row, TokenSequence, fill_rows, padding_rows, plan_rows
from mindrlhf.training.image_rows import ImageTokens, image_table, with_images
from mindrlhf.training.records import Share, TokenArrays

T = TypeVar("T")


@dataclass(frozen=True)
class RowOptions:
    """How sequences become micro-batches."""

    row_lengths: tuple[int, ...]  # ascending
    rows_per_micro_batch: int
    num_ranks: int
    pack: bool
    image_tokens: ImageTokens | None = None  # of a model with vision


@dataclass(frozen=True)
class Batch:
    """The rows of one optimiser update, cut into micro-batches that divide evenly among the ranks.

    Rank r computes ``micro_batches[r::num_ranks]``. Nothing else depends on the cutting: the loss divides by
    ``num_tokens``, the generated tokens of the whole update.
    """

    micro_batches: tuple[PackedRows, ...]
    num_tokens: int
    placed: tuple[tuple[int, int, int, int], ...]  # per sequence: micro-batch, row, first position, last + 1
    images: dict[str, np.ndarray] = field(default_factory=dict)  # digest -> uint8 [height, width, 3]

    def share(self, rank: int, num_ranks: int) -> Share:
        """Return rank's micro-batches, to which it may add token arrays of its own."""
        own = self.micro_batches[rank::num_ranks]
        return Share(tuple(replace(rows, tokens=dict(rows.tokens)) for rows in own), self.num_tokens)

    def shares(self, num_ranks: int) -> list[dict[str, Share]]:
        """Return the argument ``share`` of a call to the ranks, by rank."""
        return [{"share": self.share(rank, num_ranks)} for rank in range(num_ranks)]

    def collect(self, shares: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Gather per-position results of all ranks back into one array for each sequence: of its generated tokens.

        Args:
            shares: by rank, [rows, length] for each of its micro-batches.
        """
        return self.responses(in_order(shares))

    def responses(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one array for each sequence, of its generated tokens, from [rows, length] for each micro-batch."""
        return [
            arrays[index][row, first:last][self.micro_batches[index].mask[row, first:last] > 0]
            for index, row, first, last in self.placed
        ]

    def spread(self, responses: Sequence[np.ndarray], num_ranks: int) -> list[TokenArrays]:
        """Lay one array per sequence, of its generated tokens, out over the rows: the inverse of ``collect``.

        Returns:
            By rank, float32 [rows, length] for each of its micro-batches.
        """
        arrays = [np.zeros_like(rows.mask) for rows in self.micro_batches]
        for (micro_batch, row, first, last), values in zip(self.placed, responses, strict=True):
            is_generated = self.micro_batches[micro_batch].mask[row, first:last] > 0
            arrays[micro_batch][row, first:last][is_generated] = values
        return [TokenArrays(tuple(arrays[rank::num_ranks])) for rank in range(num_ranks)]


def in_order(shares: Sequence[Sequence[T]]) -> list[T]:
    """Return what the ranks have for their micro-batches in the order of the batch."""
    return [one for same_index in zip(*shares, strict=True) for one in same_index]


def images_of_ranks(batches: Sequence[Batch], num_ranks: int) -> list[dict[str, tuple[np.ndarray, ...]]]:
    """Return the argument ``images`` of a call to the ranks: what each one's rows look at, every image once."""
    pixels = {digest: image for batch in batches for digest, image in batch.images.items()}
    digests: list[dict[str, None]] = [{} for _ in range(num_ranks)]
    for batch in batches:
        for index, rows in enumerate(batch.micro_batches):
            digests[index % num_ranks].update(dict.fromkeys(rows.images))
    return [{"images": tuple(pixels[digest] for digest in own)} for own in digests]


def make_batch(sequences: Sequence[TokenSequence], options: RowOptions) -> Batch:
    """Pack sequences into rows and these into micro-batches; padding rows (weight 0) fill the last ones."""
    lengths = [sequence.num_tokens for sequence in sequences]
    return batch_of_rows(sequences, plan_rows(lengths, options.row_lengths, pack=options.pack), options)


def batch_of_rows(sequences: Sequence[TokenSequence], rows: Sequence[Row], options: RowOptions) -> Batch:
    """Make a batch of planned rows; ``rows`` may hold only some of the sequences."""
    size = options.rows_per_micro_batch
    micro_batches: list[PackedRows] = []
    placed: dict[int, tuple[int, int, int, int]] = {}
    for length in options.row_lengths:
        bucket = [row for row in rows if row.length == length]
        for start in range(0, len(bucket), size):
            part = bucket[start : start + size]
            for row_index, row in enumerate(part):
                _note_places(placed, sequences, row.items, len(micro_batches), row_index)
            micro_batches.append(with_images(fill_rows(sequences, part, size), sequences, part, options.image_tokens))
    while len(micro_batches) % options.num_ranks:
        padding = padding_rows(micro_batches[-1].mask.shape, tuple(micro_batches[-1].tokens))
        micro_batches.append(with_images(padding, (), (), options.image_tokens))
    num_tokens = sum(sequences[item].num_generated for item in placed)
    items = sorted(placed)
    images = image_table([sequences[item] for item in items])
    return Batch(tuple(micro_batches), num_tokens, tuple(placed[item] for item in items), images)


def _note_places(
    placed: dict, sequences: Sequence[TokenSequence], items: Sequence[int], micro_batch: int, row: int
) -> None:
    start = 0
    for item in items:
        first = start + len(sequences[item].prompt_ids) - 1
        placed[item] = (micro_batch, row, first, first + len(sequences[item].response_ids))
        start += sequences[item].num_tokens
