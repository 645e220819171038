"""The items of each step of training on a fixed set of them, epoch after epoch: a function of the step alone."""

from collections.abc import Mapping

import numpy as np

from mindrlhf.data.stream import check_same_order, epoch_order


class EpochSteps:
    """Cuts every epoch into steps of ``per_step`` items; the last step of an epoch has those that are left.

    Args:
        num_items: of the set.
        per_step: items of a step.
        seed: of the order.
        shuffle: gives each epoch an order of its own; otherwise it is that of the set.
    """

    def __init__(self, num_items: int, per_step: int, seed: int, shuffle: bool):
        self.num_items = num_items
        self.per_step = per_step
        self.seed = seed
        self.shuffle = shuffle
        self.per_epoch = -(-num_items // per_step)
        self._epoch, self._order = -1, np.arange(num_items)

    def num_steps(self, epochs: int, max_steps: int) -> int:
        """Return the steps of so many epochs, ``max_steps`` at most if that is not 0."""
        num_steps = epochs * self.per_epoch
        return min(num_steps, max_steps or num_steps)

    def items(self, step: int) -> np.ndarray:
        """Return the indices of a step, counted from 0 over all epochs."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._order = epoch_order(self.num_items, self.seed, epoch) if self.shuffle else np.arange(self.num_items)
            self._epoch = epoch
        return self._order[position * self.per_step : (position + 1) * self.per_step]

    def state(self) -> dict:
        """Return what the order depends on, as plain JSON values; the position is the run's step."""
        names = ("num_items", "per_step", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: Mapping) -> None:
        """Check that ``state`` is that of the same order.

        Raises:
            UserError: it is not, as when the data file has changed.
        """
        check_same_order(state, self.state())
