"""The order in which training takes prompts: repeatable, and resumable at any record."""

from collections.abc import Mapping

import numpy as np

from mindrlhf.errors import UserError


class EndOfEpochs(Exception):
    """Every epoch has been used."""


class PromptStream:
    """Record indices, epoch after epoch, each epoch a permutation of ``range(num_records)``.

    The order of an epoch depends on ``(num_records, seed, epoch)`` only, so the whole position is two
    integers. Ranks that build the stream from the same arguments take the same indices.

    Args:
        num_records: records in the file, at least 1.
        seed: at least 0.
        shuffle: False keeps the order of the file in every epoch.
        num_epochs: at least 1; None never ends.
    """

    def __init__(self, num_records: int, seed: int, shuffle: bool = True, num_epochs: int | None = None):
        self.num_records = num_records
        self.seed = seed
        self.shuffle = shuffle
        self.num_epochs = num_epochs
        self.epoch = 0
        self._position = 0
        self._order = self._epoch_order(0)

    @property
    def num_remaining(self) -> int | None:
        """Number of indices left to take; None when the stream never ends."""
        if self.num_epochs is None:
            return None
        return max(0, (self.num_epochs - self.epoch) * self.num_records - self._position)

    def next(self, count: int) -> list[int]:
        """Take ``count`` indices, running over into the next epoch where one ends.

        The last call of the last epoch may be shorter than ``count``: no record is left out silently.

        Raises:
            EndOfEpochs: nothing is left. (Not ``StopIteration``, which a calling generator would turn
                into a ``RuntimeError``.)
        """
        if self.num_remaining == 0:
            raise EndOfEpochs(f"all {self.num_epochs} epochs of {self.num_records} records are used up")
        indices: list[int] = []
        while len(indices) < count and self.num_remaining != 0:
            taken = self._order[self._position : self._position + count - len(indices)]
            indices += taken.tolist()
            self._position += len(taken)
            if self._position == len(self._order):
                self._go_to(self.epoch + 1, 0)
        return indices

    @property
    def num_taken(self) -> int:
        """Number of indices that ``next`` has returned since the beginning of the order."""
        return self.epoch * self.num_records + self._position

    def state(self) -> dict:
        """Return the position, and what it is only valid with, as plain JSON values."""
        return {
            "num_records": self.num_records,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self._position,
        }

    def restore(self, state: Mapping) -> None:
        """Continue from ``state``; ``num_epochs`` may differ from the run that saved it.

        Raises:
            UserError: the state is of another data set, seed or order, or is not a position in one.
        """
        check_same_order(state, {name: getattr(self, name) for name in ("num_records", "seed", "shuffle")})
        epoch, position = state.get("epoch"), state.get("position")
        is_position = isinstance(epoch, int) and isinstance(position, int)
        if not is_position or epoch < 0 or not 0 <= position < len(self._order):
            raise UserError(f"cannot resume the data order: epoch {epoch}, position {position} is not a place in it")
        self._go_to(epoch, position)

    def _go_to(self, epoch: int, position: int) -> None:
        if epoch != self.epoch:
            self._order = self._epoch_order(epoch)
        self.epoch, self._position = epoch, position

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the order of ``epoch``, int64 ``[num_records]``."""
        return epoch_order(self.num_records, self.seed, epoch) if self.shuffle else np.arange(self.num_records)


def epoch_order(num_items: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffled order of an epoch, int64 ``[num_items]``: a function of the arguments alone."""
    # NumPy promises stable streams for bit generators but not for Generator.permutation (NEP 19), and a resumed run
    # may have a newer NumPy: sort by raw 64-bit keys instead.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_items)
    return np.argsort(keys, kind="stable")


def check_same_order(saved: Mapping, now: Mapping) -> None:
    """Check that a checkpoint is of the same order of the data: it has every value of ``now``.

    Raises:
        UserError: it has not, as when the data file has changed; the message names the first that differs.
    """
    for name, value in now.items():
        if saved.get(name) != value:
            raise UserError(
                f"cannot resume the data order: {name} was {saved.get(name)} in the checkpoint and is now {value}; "
                "set it back, or start a new run"
            )
