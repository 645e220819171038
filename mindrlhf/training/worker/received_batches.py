"""What a rank was given of the updates of a step."""

from typing import Any

import numpy as np

from mindrlhf.data.packing import PackedRows
from mindrlhf.training.batch import Batch, unpack_share


class ReceivedBatches:
    """The part of a worker that holds batches; its methods are called through the team."""

    def __init__(self) -> None:
        self._batches: list[tuple[list[PackedRows], int]] = []

    def receive_batch(self, is_first: bool, **share: Any) -> None:
        """Take this rank's share of one optimiser update; ``is_first`` starts a new step."""
        if is_first:
            self._batches = []
        self._batches.append(unpack_share(share))

    def receive_tokens(self, batch: int, **arrays: np.ndarray) -> None:
        """Take further token arrays of received batch number ``batch``: ``"<index>.<name>"`` for each micro-batch."""
        for place, array in arrays.items():
            index, _, name = place.partition(".")
            self._batches[batch][0][int(index)].tokens[name] = array

    def batch_arrays(self, batch: int) -> dict[str, Any]:
        """Return this rank's share of received batch number ``batch``, with all it was given since, for a look at it.

        Returns:
            "num_micro_batches", and for each "<index>.<field>" and "<index>.tokens.<name>", as in ``Batch.share``.
        """
        micro_batches, num_tokens = self._batches[batch]
        return Batch(tuple(micro_batches), num_tokens, ()).share(0, 1)
