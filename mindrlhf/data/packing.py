"""Packing of token sequences into rows of a few fixed lengths, so that every batch has a known shape."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindrlhf.errors import UserError


@dataclass(frozen=True)
class Row:
    """One row of a batch: which sequences it holds, in order, and how long it is."""

    length: int
    items: tuple[int, ...]  # indices into the list of sequences


# Rows are a multiple of this: on Ascend it is what its cube takes; on a CPU, a vector of AVX2.
ROW_MULTIPLES = {"ascend": 16, "cpu": 8}
# Tokens of the longest sample up to which rows are chosen that hold two of it.
_LONGEST_IN_PAIRS = 2048


def choose_row_length(
    row_lengths: Sequence[int], longest: int, what: str, device: str, *, is_fitted: bool = False
) -> tuple[int, ...]:
    """Return the row lengths to use, ascending; an empty choice becomes one that fits ``longest`` tokens.

    With ``is_fitted``, for rows that are filled by best fit, it becomes two lengths: one that fits twice as many, so
    that the samples of a prompt meet in it, and one that is an eighth shorter, for what does not fill the other. Where
    samples may be long, that would cost more attention, which is quadratic, than it saves of padding: then one length
    is for the longest, and one for a quarter of it, as most samples are shorter by far.

    Raises:
        UserError: no row is long enough for ``longest``; ``what`` says what is that long.
    """
    if not row_lengths:
        multiple = ROW_MULTIPLES[device]
        if not is_fitted:
            return (-(-longest // multiple) * multiple,)
        if longest > _LONGEST_IN_PAIRS:
            return (-(-longest // 64) * 16, -(-longest // 16) * 16)
        whole = -(-2 * longest // 16) * 16
        shorter = whole - -(-whole // 128) * 16
        return (shorter, whole) if shorter >= longest else (whole,)
    if max(row_lengths) < longest:
        raise UserError(
            f"sequence_lengths ends at {max(row_lengths)}, but {what} takes {longest} tokens: "
            f"add {-(-longest // 16) * 16} to sequence_lengths, or shorten the prompts or responses"
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
            raise ValueError(f"sequence {index} has {length} tokens, more than the sequence length, {row_lengths[-1]}")
        by_length[fitting].append(index)
    rows = []
    for row_length, indices in by_length.items():
        ordered = sorted(indices, key=lambda index: -lengths[index])
        rows.extend(_first_fit(ordered, lengths, row_length) if pack else [Row(row_length, (i,)) for i in indices])
    return rows


def _first_fit(indices: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Row]:
    leaves = 1 << (len(indices) - 1).bit_length()
    most = [row_length] * (2 * leaves)  # a binary tree: the most room of the nodes 2 n and 2 n + 1, or of a row
    contents: dict[int, list[int]] = {}
    for index in indices:
        node = 1
        while node < leaves:
            node = 2 * node + (most[2 * node] < lengths[index])
        contents.setdefault(node, []).append(index)
        most[node] -= lengths[index]
        while (node := node // 2) and most[node] != (room := max(most[2 * node], most[2 * node + 1])):
            most[node] = room
    return [Row(row_length, tuple(items)) for items in contents.values()]


PREFIX_IDS, POSITIONS = "prefix_ids", "positions"


@dataclass(frozen=True)
class PackedRows:
    """Rows of one length, ready for a training cell. Position t predicts ``labels[t]``, the token that follows it.

    Plain rows hold whole sequences, one after the other. With shared prompts, a prompt without its last token is a
    segment of its own, and each of its responses is a segment that begins with that last token and ends with the last
    token but one of the response, which predicts the last. So every token of a response, the first included, is
    predicted by a position of its own segment, and no position is there that predicts nothing of its sequence.
    """

    input_ids: np.ndarray  # int32 [rows, length], 0 where nothing is; see also mindrlhf.training.vision.image_rows
    segment_ids: np.ndarray  # int32 [rows, length]: 1, 2, ... per segment of the row, 0 = padding
    labels: np.ndarray  # int32 [rows, length]
    mask: np.ndarray  # float32 [rows, length]: 1 where the label is a response token that the model generated
    # name -> float32 [rows, length]: a value per such token, at its position, else 0
    tokens: dict[str, np.ndarray]
    # name -> int32 [rows, length]: what else the model reads of each token. Nothing in plain rows. With shared prompts
    # "prefix_ids", the segment that the token's own one continues (its own where that continues none), and
    # "positions", the token's place in prompt and response, from 0. With routing replay also "experts", of another
    # dtype and shape; see mindrlhf.training.routing.rows.
    context: dict[str, np.ndarray] = field(default_factory=dict)
    images: tuple[str, ...] = ()  # digests of the images that the rows look at, in the order of their rows

    @property
    def num_rows(self) -> int:
        """Number of rows, padding rows included."""
        return self.input_ids.shape[0]

    @property
    def model_inputs(self) -> np.ndarray:
        """First input of a model: ``input_ids``, or with shared prompts int32 [rows, 3, length], see CausalLM."""
        if POSITIONS not in self.context:
            return self.input_ids
        return np.stack([self.input_ids, self.context[PREFIX_IDS], self.context[POSITIONS]], axis=1)


@dataclass(frozen=True)
class TokenSequence:
    """One prompt with its response, and named values for each response token that the model generated."""

    prompt_ids: np.ndarray  # int32 [prompt]
    response_ids: np.ndarray  # int32 [response]
    values: dict[str, np.ndarray]  # name -> float32 [generated tokens]
    is_generated: np.ndarray | None = None  # bool [response], False where a tool wrote; None: all are the model's
    images: tuple[np.ndarray, ...] = ()  # uint8 [height, width, 3] each: those of the prompt
    experts: np.ndarray | None = None  # uint8 or uint16 [tokens - 1, layers with experts, active]: to be replayed

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def prompt_key(self) -> bytes:
        """Equal for sequences that can share their prompt."""
        return self.prompt_ids.tobytes()

    @property
    def num_generated(self) -> int:
        """Response tokens that the model generated: those that losses and metrics are about."""
        return len(self.response_ids) if self.is_generated is None else int(self.is_generated.sum())


def fill_rows(
    sequences: Sequence[TokenSequence], rows: Sequence[Row], num_rows: int, *, share_prompts: bool = False
) -> PackedRows:
    """Write the sequences of ``rows`` (all of one length) into arrays of ``num_rows`` rows.

    Rows beyond ``rows`` are padding: segment 0 and mask 0 everywhere. With ``share_prompts``, neighbours of equal
    prompts have it once; see :class:`PackedRows`.
    """
    length = rows[0].length
    assert all(row.length == length for row in rows), "rows of one bucket have one length"
    assert num_rows >= len(rows), "there are more rows than room"
    names = tuple(sequences[rows[0].items[0]].values)
    packed = padding_rows((num_rows, length), names, share_prompts=share_prompts)
    for row_index, row in enumerate(rows):
        if share_prompts:
            _place_shared(packed, sequences, row, row_index)
            continue
        start = 0
        for segment, item in enumerate(row.items, start=1):
            start = _place(packed, sequences[item], row_index, start, segment)
    return packed


def first_positions(sequences: Sequence[TokenSequence], row: Row, *, share_prompts: bool) -> Iterator[tuple[int, int]]:
    """Yield each item of a row and the position that predicts the first token of its response."""
    start, held = 0, None
    for item in row.items:
        sequence = sequences[item]
        if not share_prompts:
            yield item, start + len(sequence.prompt_ids) - 1
            start += sequence.num_tokens
            continue
        if sequence.prompt_key != held:
            held = sequence.prompt_key
            start += len(sequence.prompt_ids) - 1
        yield item, start
        start += len(sequence.response_ids)


def _place(packed: PackedRows, sequence: TokenSequence, row: int, start: int, segment: int) -> int:
    ids = np.concatenate([sequence.prompt_ids, sequence.response_ids])
    stop = start + len(ids)
    packed.input_ids[row, start:stop] = ids
    packed.segment_ids[row, start:stop] = segment
    packed.labels[row, start : stop - 1] = ids[1:]
    # The last prompt position predicts the first response token.
    _place_values(packed, sequence, row, start + len(sequence.prompt_ids) - 1)
    return stop


def _place_shared(packed: PackedRows, sequences: Sequence[TokenSequence], row: Row, row_index: int) -> None:
    held, prompt_segment, segment = None, 0, 0
    for item, first in first_positions(sequences, row, share_prompts=True):
        sequence = sequences[item]
        shared = sequence.prompt_ids[:-1]
        if sequence.prompt_key != held:
            held = sequence.prompt_key
            prompt_segment = segment = segment + 1
            _place_segment(packed, row_index, first - len(shared), shared, (segment, segment, 0))
        segment += 1
        ids = np.concatenate([sequence.prompt_ids[-1:], sequence.response_ids])
        _place_segment(packed, row_index, first, ids[:-1], (segment, prompt_segment, len(shared)))
        packed.labels[row_index, first : first + len(ids) - 1] = ids[1:]
        _place_values(packed, sequence, row_index, first)


def _place_segment(packed: PackedRows, row: int, start: int, ids: np.ndarray, numbers: tuple[int, int, int]) -> None:
    """Write ``ids``; ``numbers``: of their segment, of the one that it continues, and of the first position."""
    place = (row, slice(start, start + len(ids)))
    packed.input_ids[place] = ids
    packed.segment_ids[place], packed.context[PREFIX_IDS][place], first = numbers
    packed.context[POSITIONS][place] = first + np.arange(len(ids))


def _place_values(packed: PackedRows, sequence: TokenSequence, row: int, first: int) -> None:
    stop = first + len(sequence.response_ids)
    chosen = slice(None) if sequence.is_generated is None else sequence.is_generated
    packed.mask[row, first:stop][chosen] = 1.0
    for name, values in sequence.values.items():
        packed.tokens[name][row, first:stop][chosen] = values


def padding_rows(shape: tuple[int, int], names: Sequence[str] = (), *, share_prompts: bool = False) -> PackedRows:
    """Return rows that hold nothing: segment 0 and weight 0 everywhere."""
    return PackedRows(
        input_ids=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        labels=np.zeros(shape, np.int32),
        mask=np.zeros(shape, np.float32),
        tokens={name: np.zeros(shape, np.float32) for name in names},
        context={name: np.zeros(shape, np.int32) for name in (PREFIX_IDS, POSITIONS)} if share_prompts else {},
    )
