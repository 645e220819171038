"""From scored samples to the micro-batches of every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindrlhf.data.packing import PackedRows, Row, TokenSequence, fill_rows, padding_rows, plan_rows

_FIELDS = ("input_ids", "segment_ids", "labels", "mask")


@dataclass(frozen=True)
class RowOptions:
    """How sequences become micro-batches."""

    row_lengths: tuple[int, ...]  # ascending
    rows_per_micro_batch: int
    num_ranks: int
    pack: bool


@dataclass(frozen=True)
class Batch:
    """The rows of one optimiser update, cut into micro-batches that divide evenly among the ranks.

    Rank r computes ``micro_batches[r::num_ranks]``. Nothing else depends on the cutting: the loss divides by
    ``num_tokens``, the generated tokens of the whole update.
    """

    micro_batches: tuple[PackedRows, ...]
    num_tokens: int
    placed: tuple[tuple[int, int, int, int], ...]  # per sequence: micro-batch, row, first position, last + 1

    def share(self, rank: int, num_ranks: int) -> dict[str, Any]:
        """Return rank's micro-batches as arrays and JSON values by name, the inverse of ``unpack_share``."""
        values: dict[str, Any] = {"num_tokens": self.num_tokens}
        own = self.micro_batches[rank::num_ranks]
        values["num_micro_batches"] = len(own)
        for index, rows in enumerate(own):
            values.update({f"{index}.{field}": getattr(rows, field) for field in _FIELDS})
            values.update({f"{index}.tokens.{name}": array for name, array in rows.tokens.items()})
        return values

    def collect(self, shares: Sequence[Mapping[str, np.ndarray]], name: str) -> list[np.ndarray]:
        """Gather per-position results of all ranks back into one array for each sequence: of its generated tokens.

        Args:
            shares: by rank, ``"<index>.<name>"`` -> [rows, length] for each of its micro-batches.
        """
        responses = []
        for micro_batch, row, first, last in self.placed:
            rank, index = micro_batch % len(shares), micro_batch // len(shares)
            is_generated = self.micro_batches[micro_batch].mask[row, first:last] > 0
            responses.append(shares[rank][f"{index}.{name}"][row, first:last][is_generated])
        return responses

    def spread(self, responses: Sequence[np.ndarray], name: str, num_ranks: int) -> list[dict[str, np.ndarray]]:
        """Lay one array per sequence, of its generated tokens, out over the rows: the inverse of ``collect``.

        Returns:
            By rank, ``"<index>.<name>"`` -> float32 [rows, length] for each of its micro-batches.
        """
        arrays = [np.zeros_like(rows.mask) for rows in self.micro_batches]
        for (micro_batch, row, first, last), values in zip(self.placed, responses, strict=True):
            is_generated = self.micro_batches[micro_batch].mask[row, first:last] > 0
            arrays[micro_batch][row, first:last][is_generated] = values
        return [
            {f"{index}.{name}": array for index, array in enumerate(arrays[rank::num_ranks])}
            for rank in range(num_ranks)
        ]


def unpack_share(values: Mapping[str, Any]) -> tuple[list[PackedRows], int]:
    """Return the micro-batches and the token count of a share that another rank cut."""
    micro_batches = []
    for index in range(values["num_micro_batches"]):
        prefix = f"{index}.tokens."
        tokens = {name[len(prefix) :]: array for name, array in values.items() if name.startswith(prefix)}
        micro_batches.append(PackedRows(**{field: values[f"{index}.{field}"] for field in _FIELDS}, tokens=tokens))
    return micro_batches, values["num_tokens"]


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
            micro_batches.append(fill_rows(sequences, part, size))
    while len(micro_batches) % options.num_ranks:
        micro_batches.append(padding_rows(micro_batches[-1].mask.shape, tuple(micro_batches[-1].tokens)))
    num_tokens = sum(sequences[item].num_generated for item in placed)
    return Batch(tuple(micro_batches), num_tokens, tuple(placed[item] for item in sorted(placed)))


def _note_places(
    placed: dict, sequences: Sequence[TokenSequence], items: Sequence[int], micro_batch: int, row: int
) -> None:
    start = 0
    for item in items:
        first = start + len(sequences[item].prompt_ids) - 1
        placed[item] = (micro_batch, row, first, first + len(sequences[item].response_ids))
        start += sequences[item].num_tokens
