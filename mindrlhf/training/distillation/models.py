"""The teachers of a run on one rank: frozen models in memory together, of which each row is shown to its own."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from mindrlhf.data.packing import PackedRows


class FrozenModel(Protocol):
    """What a teacher is: see :class:`mindrlhf.training.engine.model.Model`, or several behind one interface.

    Attributes:
        network: the model.
    """

    network: object

    def see(self, images: Sequence[np.ndarray]) -> None:
        """Take the images of a step, uint8 [height, width, 3] each."""

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """Return what the model says of each token of this rank's rows, float32 [rows, length]."""

    def top_tokens(self, rows: PackedRows) -> dict[str, np.ndarray]:
        """Return what a whole model finds likeliest in the place of each token, by names of token arrays.

        These are "reference_logprobs", float32 [rows, length], of the tokens that are there; "teacher_tokens", int32
        [rows, length, K], the likeliest first and of equally likely ones the smallest number; and
        "teacher_logprobs", float32 [rows, length, K + 1], their log-probabilities and that of all others together. All
        are 0 outside the mask.
        """


class Teachers:
    """Several teachers as if they were one model: each row has the log-probabilities of its own.

    Rows that name no teachers, such as those that graphs are compiled with, are shown to all.

    Args:
        models: those numbered from 1 in ``PackedRows.teachers``, in order.
    """

    def __init__(self, models: Sequence[FrozenModel]):
        self._models = tuple(models)
        self.network = models[0].network

    def see(self, images: Sequence[np.ndarray]) -> None:
        """See :meth:`FrozenModel.see`."""
        for model in self._models:
            model.see(images)

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """See :meth:`FrozenModel.logprobs`; 0 in rows of padding."""
        found = np.zeros(rows.mask.shape, np.float32)
        for model, own in self._asked(rows):
            found[own] = model.logprobs(rows)[own]
        return found

    def top_tokens(self, rows: PackedRows) -> dict[str, np.ndarray]:
        """See :meth:`FrozenModel.top_tokens`; 0 in rows of padding."""
        found: dict[str, np.ndarray] = {}
        for model, own in self._asked(rows):
            for name, array in model.top_tokens(rows).items():
                found.setdefault(name, np.zeros_like(array))[own] = array[own]
        return found

    def _asked(self, rows: PackedRows) -> Iterator[tuple[FrozenModel, list[int]]]:
        """Yield each model that is shown the rows, and the numbers of its own."""
        for number in rows.asked if rows.teachers else range(1, len(self._models) + 1):
            yield self._models[number - 1], [row for row, teacher in enumerate(rows.teachers) if teacher == number]


def as_one(models: Sequence[FrozenModel]) -> FrozenModel | None:
    """Return the reference model of a run, or its teachers as one; None when there is none."""
    if len(models) > 1:
        return Teachers(models)
    return models[0] if models else None
