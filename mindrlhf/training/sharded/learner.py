"""The updates of a sharded policy, or critic: what a rank puts into the graph of an update, and its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.losses import POLICY_INPUTS
from mindrlhf.checkpoint.optimizer import optimizer_state
from mindrlhf.checkpoint.state import MODEL_NAME, OPTIMIZER_NAME, StateWriter
from mindrlhf.data.packing import PackedRows
from mindrlhf.errors import UserError
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.shards.save import state_layouts, step_layout
from mindrlhf.shards.sources import ArraySource
from mindrlhf.training.records import Share
from mindrlhf.training.sharded.cells import ParallelUpdate
from mindrlhf.training.sharded.model import ShardedModel, set_shard
from mindrlhf.training.sharded.offload import OffloadedState
from mindrlhf.training.worker.learner import CountsCompiles
from mindrlhf.training.worker.policy_learner import LearnerUpdate


@dataclass(frozen=True)
class UpdateGraph:
    """The graph of an update, and the parameters in it that the host reads and sets.

    It is the product's own cell (:meth:`of`), or one that was compiled elsewhere.

    Attributes:
        cell: takes this rank's four row arrays, those of ``token_inputs``, and ``scalars`` (see
            :class:`mindrlhf.training.sharded.losses.ShardedLoss`); returns statistics and the gradient norm [1], as
            :class:`mindrlhf.training.sharded.cells.ParallelUpdate` does.
        learning_rate: float32 scalar, set before an update.
        is_last: float32 [1], set before each call: 1 makes the update.
        state: AdamW's moments and step count of this rank (more do no harm), by their names in a checkpoint
            (:func:`mindrlhf.checkpoint.optimizer.optimizer_state`).
        token_inputs: names of the token arrays that the loss takes, in order.
    """

    cell: Callable[..., tuple[ms.Tensor, ms.Tensor]]
    learning_rate: ms.Parameter
    is_last: ms.Parameter
    state: Mapping[str, ms.Parameter]
    token_inputs: tuple[str, ...] = POLICY_INPUTS

    @classmethod
    def of(cls, update: ParallelUpdate, token_inputs: tuple[str, ...] = POLICY_INPUTS) -> "UpdateGraph":
        """Return that of a cell of the product."""
        optimizer = update.optimizer
        return cls(update, optimizer.learning_rate, update.is_last, optimizer_state(optimizer), token_inputs)


class ShardedLearner(CountsCompiles):
    """Updates a sharded model from micro-batches of this rank's rows.

    Args:
        model: its shard.
        graph: of the update; its parameters must be those of the model.
        offloaded: the state that is on the host between updates; None keeps all on the device.
    """

    returns_logprobs = False
    # Where a checkpoint has its weights, and the optimiser's state if that is in a file of its own.
    model_name, optimizer_name = MODEL_NAME, OPTIMIZER_NAME

    def __init__(self, model: ShardedModel, graph: UpdateGraph, offloaded: OffloadedState | None = None):
        super().__init__()
        self.model = model
        self.graph = graph
        self._offloaded = offloaded

    def make_room(self) -> None:
        """See :meth:`CountsCompiles.make_room`."""
        if self._offloaded is not None:
            self._offloaded.send()

    def _fetch_state(self) -> None:
        if self._offloaded is not None:
            self._offloaded.fetch()

    def compile(self, rows: PackedRows) -> None:
        """Compile the update for the shape of ``rows``; its cell must be MindSpore's."""
        self.count_compile("update", rows)
        self.graph.cell.compile(*self._inputs(rows, 0.0, 1))

    def warm_up(self, rows: PackedRows) -> None:
        """Run the graph on rows of weight 0 without an update."""
        self._call(rows, 0.0, 1, is_last=False)

    def update(self, share: Share, lr: float, kl_coefficient: float) -> LearnerUpdate:
        """Make one optimiser update.

        Args:
            share: this rank's rows; as many micro-batches on every rank.
            lr: learning rate.
            kl_coefficient: weight of the KL term.

        Returns:
            Statistics of all ranks' rows on ranks of the first replica and the last stage, zeros on others, so that
            those of the replicas add up.
        """
        self.graph.learning_rate.set_data(ms.Tensor(lr, ms.float32))
        total, norm = np.zeros(1), 0.0
        for index, rows in enumerate(share.micro_batches):
            is_last = index == len(share.micro_batches) - 1
            statistics, norm = self._call(rows, kl_coefficient, share.num_tokens, is_last=is_last)
            total = total + statistics
        is_first_replica = self.model.layout.coordinates(self.model.rank).data == 0
        return LearnerUpdate(total if is_first_replica else np.zeros_like(total), norm, None)

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint of all ranks, in bytes."""
        return self.model.size_bytes(self.graph.state)

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`SavesState.state_writer`: of shards of weights and optimiser state, wherever that is."""
        return self.model.state_writer(self.model_name, hold, self.graph.state)

    def restore(self, directory: str) -> None:
        """Take this rank's shard of a checkpoint, whatever the layout of the run that saved it."""
        self._fetch_state()
        optimizer_file = Path(directory) / self.optimizer_name
        optimizer_file = optimizer_file if optimizer_file.is_file() else ""
        source = self.model.open_saved(Path(directory) / self.model_name, optimizer_file)
        self.model.load(source)
        self._restore_state(source)

    def _restore_state(self, source: ArraySource) -> None:
        for one in self._state_layouts():
            if one.name not in source.dtypes:
                raise UserError(f"{source.directory} lacks {one.name} of the optimiser: it is no checkpoint of a run")
            set_shard(self.graph.state[one.name], source.read_shard(one, self.model.rank), one)
            source.release(one.name)

    def _state_layouts(self) -> list[ParameterLayout]:
        """Return how AdamW's state that this rank holds lies on the ranks."""
        trained = {one.name: f"exp_avg.{one.name}" in self.graph.state for one in self.model.held}
        return [*state_layouts(self.model.held, trained), step_layout(self.model.layout)]

    def _call(
        self, rows: PackedRows, kl_coefficient: float, num_tokens: int, *, is_last: bool
    ) -> tuple[np.ndarray, float]:
        self._fetch_state()
        self.graph.is_last.set_data(ms.Tensor([float(is_last)], ms.float32))
        statistics, norm = self.graph.cell(*self._inputs(rows, kl_coefficient, num_tokens))
        values = statistics.asnumpy().astype(np.float64)
        return (values if self.model.is_in_last_stage else np.zeros_like(values)), float(norm.asnumpy()[0])

    def _inputs(self, rows: PackedRows, kl_coefficient: float, num_tokens: int) -> list[ms.Tensor]:
        unread = np.zeros_like(rows.mask)
        values = [self.model.per_token(rows.tokens.get(name, unread)) for name in self.graph.token_inputs]
        num_rows = len(rows.mask) * self.model.layout.data_parallel
        scalars = np.tile(np.array([[kl_coefficient, num_tokens]], np.float32), (num_rows, 1))
        num_micro_batches = self.model.num_update_micro_batches
        inputs = (*self.model.row_inputs(rows, num_micro_batches), *self.model.inputs(values, num_micro_batches))
        return [*inputs, ms.Tensor(scalars)]
