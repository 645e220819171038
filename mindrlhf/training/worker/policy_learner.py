"""The updates of a whole policy in reinforcement learning; of a sharded one see mindrlhf.training.sharded.learner."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.data.packing import PackedRows
from mindrlhf.training.batch import Batch
from mindrlhf.training.records import ProcessStatistics
from mindrlhf.training.worker.cell_dump import CellDump
from mindrlhf.training.worker.learner import Learner
from mindrlhf.training.worker.model import RankModel


@dataclass(frozen=True)
class LearnerUpdate:
    """What one update gave on a rank.

    Attributes:
        statistics: float64 [statistics of the loss]; those of all data-parallel replicas add up.
        grad_norm: not finite says that there was no update.
        logprobs: float32 [rows, length] for each micro-batch, under the weights before; None where the update does not
            return them.
    """

    statistics: np.ndarray
    grad_norm: float
    logprobs: tuple[np.ndarray, ...] | None


class ActorLearner(Protocol):
    """What :class:`mindrlhf.training.worker.actor.Actor` needs of a learner, whole or sharded.

    Attributes:
        model: what it trains.
        returns_logprobs: its updates return the log-probabilities that they began with.
    """

    model: RankModel
    returns_logprobs: bool

    def warm_up(self, rows: PackedRows) -> None:
        """Run the update on rows of weight 0, which changes nothing."""

    def update(self, batch: Batch, lr: float, kl_coefficient: float) -> LearnerUpdate:
        """Make one optimiser update."""

    def make_room(self) -> None:
        """Give up device memory that only an update needs, if there is another place for it."""

    def count_compile(self, graph: str, rows: PackedRows) -> None:
        """Note that a graph runs on these rows."""

    def process_statistics(self) -> ProcessStatistics:
        """Return what this rank has used so far."""

    def state_size_bytes(self) -> int:
        """Return the size of weights and optimiser state in a checkpoint."""

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`mindrlhf.training.checkpoints.shards.SavesState.state_writer`."""

    def restore(self, directory: str) -> None:
        """Load weights and optimiser state."""


class PolicyLearner(Learner):
    """Updates a whole policy; the loss has the signature of :class:`mindrlhf.algorithms.losses.PolicyLoss`."""

    returns_logprobs = True
    cell_dump: CellDump | None = None

    def warm_up(self, rows: PackedRows) -> None:
        """Compile the update for rows of weight 0."""
        self.accumulate(rows, [*self.loss.token_arrays({}, rows.mask), np.float32(0.0)], 1)

    def update(self, batch: Batch, lr: float, kl_coefficient: float) -> LearnerUpdate:
        """Make one optimiser update; statistics are sums over this rank's tokens. See :meth:`Learner.apply`."""
        total, logprobs = np.zeros(len(self.loss.statistics)), []
        if self.cell_dump is not None:
            self.cell_dump.forward("update", self.policy, batch.micro_batches)
        for rows in batch.micro_batches:
            values = [*self.loss.token_arrays(rows.tokens, rows.mask), np.float32(kl_coefficient)]
            statistics, computed = self.accumulate(rows, values, batch.num_tokens)
            total += statistics
            logprobs.append(computed)
        if self.cell_dump is not None:
            self.cell_dump.gradients(self.policy, self.gradients())
        norm = self.apply(lr, loss=float(total[0]))
        return LearnerUpdate(total, norm, tuple(logprobs))
