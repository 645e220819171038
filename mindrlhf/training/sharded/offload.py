"""Moments and gradient sums that are on the host while nothing is updated."""

from collections.abc import Collection

import mindspore as ms

from mindrlhf.training.sharded.cells import ParallelUpdate


class OffloadedState:
    """The part of an update's parameters that only an update needs.

    Args:
        update: the compiled cell.
        held: names of the weights that this rank holds; of others there is no data.
    """

    def __init__(self, update: ParallelUpdate, held: Collection[str]):
        optimizer = update.optimizer
        groups = zip(update.weights, optimizer.exp_avg, optimizer.exp_avg_sq, update.totals, strict=True)
        self._parameters = [one for weight, *state in groups if weight.name in held for one in state]
        self._is_away = False

    def send(self) -> None:
        """Move it to the host, and give the device's memory back to other processes."""
        if not self._is_away:
            for parameter in self._parameters:
                parameter._offload()
            self._is_away = True
        ms.runtime.empty_cache()

    def fetch(self) -> None:
        """Have it on the device."""
        if self._is_away:
            for parameter in self._parameters:
                parameter._load()
            self._is_away = False
