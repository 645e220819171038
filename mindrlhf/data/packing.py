"""Packing of token sequences into rows of a few fixed lengths, so that every batch has a known shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.errors import UserError


@dataclass(frozen=True)
class Row:
    """One row of a batch: which sequences it holds, in order, and how long it is."""

    length: int
    items: tuple[int, ...]  # indices into the list of sequences


def choose_row_length(row_lengths: Sequence[int], longest: int, what: str) -> tuple[int, ...]:
    """Return the row lengths to use, ascending; an empty choice becomes one that fits ``longest`` tokens.

    Raises:
        UserError: no row is long enough for ``longest``; ``what`` says what is that long.
    """
    if not row_lengths:
        return (-(-longest // 16) * 16,)  # a multiple of 16 suits vector units and Ascend's cube alike
    if max(row_lengths) < longest:
        raise UserError(
            f"row_lengths ends at {max(row_lengths)}, but {what} takes {longest} tokens: "
            f"add {-(-longest // 16) * 16} to row_lengths, or shorten the prompts or responses"
        )
    return tuple(sorted(set(row_lengths)))


def plan_rows(lengths: Sequence[int], row_lengths: Sequence[int], *, pack: bool = True) -> list[Row]:
    """Assign every sequence to exactly one row.

    A sequence goes to the smallest row length that fits it; within one row length they are packed
    first-fit decreasing. Ties keep the order of the input, so the plan is a function of the lengths.

    Args:
        lengths: tokens of each sequence, each at least 1.
        row_lengths: allowed row lengths, ascending.
        pack: several sequences may share a row.

    Returns:
        The rows, grouped by length ascending.

    Raises:
        ValueError: a sequence fits no row.
    """
    by_length: dict[int, list[int]] = {length: [] for length in row_lengths}
    for index, length in enumerate(lengths):
        fitting = next((row for row in row_lengths if row >= length), None)
        if fitting is None:
            raise ValueError(f"sequence {index} has {length} tokens, more than the longest row, {row_lengths[-1]}")
        by_length[fitting].append(index)
    rows = []
    for row_length, indices in by_length.items():
        ordered = sorted(indices, key=lambda index: -lengths[index])
        rows.extend(_first_fit(ordered, lengths, row_length) if pack else [Row(row_length, (i,)) for i in indices])
    return rows


def _first_fit(indices: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Row]:
    contents: list[list[int]] = []
    free: list[int] = []
    for index in indices:
        place = next((row for row, space in enumerate(free) if space >= lengths[index]), None)
        if place is None:
            contents.append([])
            free.append(row_length)
            place = len(free) - 1
        contents[place].append(index)
        free[place] -= lengths[index]
    return [Row(row_length, tuple(items)) for items in contents]


@dataclass(frozen=True)
class PackedRows:
    """Rows of one length, ready for a training cell. Position t predicts ``labels[t]``, the token at t + 1."""

    input_ids: np.ndarray  # int32 [rows, length], 0 where nothing is; see also mindrlhf.training.image_rows
    segment_ids: np.ndarray  # int32 [rows, length]: 1, 2, ... per sequence of the row, 0 = padding
    labels: np.ndarray  # int32 [rows, length]
    mask: np.ndarray  # float32 [rows, length]: 1 where the label is a response token that the model generated
    tokens: dict[str, np.ndarray]  # name -> float32 [rows, length]: a value per such token, at its position, else 0
    images: tuple[str, ...] = ()  # digests of the images that the rows look at, in the order of their rows

    @property
    def num_rows(self) -> int:
        """Number of rows, padding rows included."""
        return self.input_ids.shape[0]


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with its response, and named values for each response token that the model generated."""

    prompt_ids: np.ndarray  # int32 [prompt]
    response_ids: np.ndarray  # int32 [response]
    values: dict[str, np.ndarray]  # name -> float32 [generated tokens]
    is_generated: np.ndarray | None = None  # bool [response], False where a tool wrote; None: all are the model's
    images: tuple[np.ndarray, ...] = ()  # uint8 [height, width, 3] each: those of the prompt

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_generated(self) -> int:
        """Response tokens that the model generated: those that losses and metrics are about."""
        return len(self.response_ids) if self.is_generated is None else int(self.is_generated.sum())


def fill_rows(sequences: Sequence[TokenSequence], rows: Sequence[Row], num_rows: int) -> PackedRows:
    """Write the sequences of ``rows`` (all of one length) into arrays of ``num_rows`` rows.

    Rows beyond ``rows`` are padding: segment 0 and mask 0 everywhere.
    """
    length = rows[0].length
    assert all(row.length == length for row in rows), "rows of one bucket have one length"
    assert num_rows >= len(rows), "there are more rows than room"
    packed = padding_rows((num_rows, length), tuple(sequences[rows[0].items[0]].values))
    for row_index, row in enumerate(rows):
        start = 0
        for segment, item in enumerate(row.items, start=1):
            start = _place(packed, sequences[item], row_index, start, segment)
    return packed


def _place(packed: PackedRows, sequence: TokenSequence, row: int, start: int, segment: int) -> int:
    ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
    stop = start + len(ids)
    packed.input_ids[row, start:stop] = ids
    packed.segment_ids[row, start:stop] = segment
    packed.labels[row, start : stop - 1] = ids[1:]
    # The last prompt position predicts the first response token.
    first = start + len(sequence.prompt_ids) - 1
    chosen = slice(None) if sequence.is_generated is None else sequence.is_generated
    packed.mask[row, first : stop - 1][chosen] = 1.0
    for name, values in sequence.values.items():
        packed.tokens[name][row, first : stop - 1][chosen] = values
    return stop


def padding_rows(shape: tuple[int, int], names: Sequence[str] = ()) -> PackedRows:
    """Return rows that hold nothing: segment 0 and weight 0 everywhere."""
    return PackedRows(
        input_ids=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        labels=np.zeros(shape, np.int32),
        mask=np.zeros(shape, np.float32),
        tokens={name: np.zeros(shape, np.float32) for name in names},
    )
