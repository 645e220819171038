"""Rows that one teacher judges as a whole, so that every sample costs the forward pass of one teacher."""

import dataclasses
from collections.abc import Callable, Sequence

from mindrlhf.data.packing import PackedRows, Row, TokenSequence


def plan_by_teacher(
    sequences: Sequence[TokenSequence], plan: Callable[[Sequence[TokenSequence]], list[Row]]
) -> list[Row]:
    """Return what ``plan`` makes of the sequences of each teacher, so that no row has samples of two."""
    items: dict[int, list[int]] = {}
    for item, sequence in enumerate(sequences):
        items.setdefault(sequence.teacher, []).append(item)
    rows = []
    for teacher in sorted(items):
        own = items[teacher]
        planned = plan([sequences[item] for item in own])
        rows += [dataclasses.replace(row, items=tuple(own[item] for item in row.items)) for row in planned]
    return rows


def with_teachers(packed: PackedRows, sequences: Sequence[TokenSequence], rows: Sequence[Row]) -> PackedRows:
    """Return what ``fill_rows`` made of ``rows`` with the teacher of each; as it is where there is one for all."""
    teachers = [sequences[row.items[0]].teacher for row in rows]
    if not any(teachers):
        return packed
    return dataclasses.replace(packed, teachers=(*teachers, *[0] * (packed.num_rows - len(rows))))


def asked_together(micro_batches: Sequence[PackedRows], num_together: int) -> tuple[PackedRows, ...]:
    """Return micro-batches that say which teachers are asked about them.

    Args:
        micro_batches: of one update, in order.
        num_together: as many that follow each other are computed by the ranks of one graph: a teacher that one of them
            needs is asked about all.
    """
    if not any(rows.teachers for rows in micro_batches):
        return tuple(micro_batches)
    asked = []
    for start in range(0, len(micro_batches), num_together):
        turn = micro_batches[start : start + num_together]
        needed = tuple(sorted({teacher for rows in turn for teacher in rows.teachers} - {0}))
        for rows in turn:
            teachers = rows.teachers or (0,) * rows.num_rows
            asked.append(dataclasses.replace(rows, teachers=teachers, asked=needed))
    return tuple(asked)
