"""Packed rows that say which experts the generator sent each of their tokens to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindrlhf.data.packing import PackedRows, Row, TokenSequence, first_positions
from mindrlhf.rollout.types import experts_dtype
from mindrlhf.specs import ModelDims

EXPERTS = "experts"  # what `PackedRows.context` calls them


@dataclass(frozen=True)
class ReplayedExperts:
    """Shape and dtype of a model's choices of experts.

    Attributes:
        num_layers: layers with experts.
        num_active: experts that a token is sent to.
        num_experts: to choose from.
    """

    num_layers: int
    num_active: int
    num_experts: int

    @classmethod
    def of(cls, dims: ModelDims) -> "ReplayedExperts | None":
        """Those of a model; None when it has no experts."""
        if dims.experts is None:
            return None
        return cls(sum(dims.experts.layers), dims.experts.num_active, dims.experts.num_experts)

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """Of the numbers of experts; its largest says that the router is to choose."""
        return experts_dtype(self.num_experts)


def with_experts(
    packed: PackedRows,
    sequences: Sequence[TokenSequence],
    rows: Sequence[Row],
    experts: ReplayedExperts | None,
    *,
    share_prompts: bool,
) -> PackedRows:
    """Return what `fill_rows` made of ``rows`` with the experts of its tokens; as it is where none are replayed.

    They are uint8 or uint16 `[rows, length, layers with experts, active experts]`. The last token of a sequence, which
    the generator never read, and padding have the largest number of the dtype. A prompt that several samples share has
    the experts of the first.
    """
    if experts is None:
        return packed
    shape = (*packed.mask.shape, experts.num_layers, experts.num_active)
    chosen = np.full(shape, np.iinfo(experts.dtype).max, experts.dtype)
    for row_index, row in enumerate(rows):
        held = None
        for item, first in first_positions(sequences, row, share_prompts=share_prompts):
            sequence = sequences[item]
            before = len(sequence.prompt_ids) - 1
            if not share_prompts or sequence.prompt_key != held:
                held = sequence.prompt_key
                chosen[row_index, first - before : first] = sequence.experts[:before]
            chosen[row_index, first : first + len(sequence.response_ids)] = sequence.experts[before:]
    return replace(packed, context={**packed.context, EXPERTS: chosen})


def without_experts(rows: PackedRows) -> PackedRows:
    """Return rows whose tokens are sent where a model's own routers say."""
    return replace(rows, context={name: array for name, array in rows.context.items() if name != EXPERTS})


def experts_by_layer(rows: PackedRows) -> np.ndarray | None:
    """Return the experts of ``rows`` as a model takes them, int32 `[layers, rows * length, active]`; None if none."""
    if EXPERTS not in rows.context:
        return None
    chosen = rows.context[EXPERTS]
    by_layer = chosen.reshape(-1, *chosen.shape[2:]).transpose(1, 0, 2)
    return np.ascontiguousarray(by_layer, np.int32)


def tokens_and_experts(rows: PackedRows, dims: ModelDims) -> np.ndarray:
    """Return both as a model for Ascend takes them, int32 `[rows, length, 1 + layers * active]`.

    Where rows have no experts, its routers are to choose.
    """
    shape, experts = rows.input_ids.shape, ReplayedExperts.of(dims)
    none = np.full((*shape, experts.num_layers * experts.num_active), experts.num_experts)
    chosen = rows.context.get(EXPERTS, none).reshape(none.shape)
    return np.concatenate([rows.input_ids[..., None], chosen], axis=-1).astype(np.int32)
