"""The updates of a sharded policy, or critic: what a rank puts into the graph of an update, and its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.losses import POLICY_INPUTS
from mindrlhf.algorithms.optimizers import STATE_NAMES
from mindrlhf.checkpoint.optimizer import optimizer_state
from mindrlhf.checkpoint.state import MODEL_NAME, OPTIMIZER_NAME, StateWriter
from mindrlhf.config.memory import MemorySection
from mindrlhf.data.packing import PackedRows
from mindrlhf.errors import UserError
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.layout.rows import step_length
from mindrlhf.shards.save import state_layouts, step_layout
from mindrlhf.shards.sources import ArraySource
from mindrlhf.training.batch import Batch
from mindrlhf.training.sharded.cells import ParallelGradients, ParallelUpdate
from mindrlhf.training.sharded.model import ShardedModel, set_shard
from mindrlhf.training.sharded.offload import OptimizerPlaces
from mindrlhf.training.worker.learner import CountsCompiles, LearnerUpdate

_ROW_ARRAYS = ("input_ids", "segment_ids", "labels", "mask")


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
        state: the optimiser's, with its step count, of this rank (more do no harm), by their names in a checkpoint
            (:func:`mindrlhf.checkpoint.optimizer.optimizer_state`).
        token_inputs: names of the token arrays that the loss takes, in order.
        gradients: takes what ``cell`` does and adds gradients without touching ``state``; all rows of an update go
            there, and ``cell`` makes the update from a short row of weight 0. None: all go to ``cell``.
    """

    cell: Callable[..., tuple[ms.Tensor, ms.Tensor]]
    learning_rate: ms.Parameter
    is_last: ms.Parameter
    state: Mapping[str, ms.Parameter]
    token_inputs: tuple[str, ...] = POLICY_INPUTS
    gradients: Callable[..., tuple[ms.Tensor, ms.Tensor]] | None = None

    @classmethod
    def of(
        cls, update: ParallelUpdate, memory: MemorySection, token_inputs: tuple[str, ...] = POLICY_INPUTS
    ) -> "UpdateGraph":
        """Return that of a cell of the product, in two parts where the section says so."""
        optimizer = update.optimizer
        gradients = ParallelGradients(update) if memory.swap_moments else None
        state = optimizer_state(optimizer)
        return cls(update, optimizer.learning_rate, update.is_last, state, token_inputs, gradients)


class ShardedLearner(CountsCompiles):
    """Updates a sharded model from micro-batches of this rank's rows.

    Args:
        model: its shard.
        graph: of the update; its parameters must be those of the model.
        places: of the optimiser's state; None leaves all on the device.
    """

    returns_logprobs = False
    # Where a checkpoint has its weights, and the optimiser's state if that is in a file of its own.
    model_name, optimizer_name = MODEL_NAME, OPTIMIZER_NAME

    def __init__(self, model: ShardedModel, graph: UpdateGraph, places: OptimizerPlaces | None = None):
        super().__init__()
        self.model = model
        self.graph = graph
        self._places = places

    def make_room(self) -> None:
        """See :meth:`CountsCompiles.make_room`."""
        if self._places is not None:
            self._places.make_room()

    def compile(self, rows: PackedRows) -> None:
        """Compile the update for the shape of ``rows``; its cells must be MindSpore's."""
        if self.graph.gradients is not None:
            self.count_compile("gradients", rows)
            self.graph.gradients.compile(*self._inputs(rows, 0.0, 1))
            rows = self._step_rows(rows)
        self.count_compile("update", rows)
        self.graph.cell.compile(*self._inputs(rows, 0.0, 1))

    def warm_up(self, rows: PackedRows) -> None:
        """Run the graphs on rows of weight 0 without an update."""
        if self.graph.gradients is not None:
            self._add(rows, 0.0, 1)
            rows = self._step_rows(rows)
        self._call(rows, 0.0, 1, is_last=False)

    def update(self, batch: Batch, lr: float, kl_coefficient: float) -> LearnerUpdate:
        """Make one optimiser update.

        Args:
            batch: this rank's rows; as many micro-batches on every rank.
            lr: learning rate.
            kl_coefficient: weight of the KL term.

        Returns:
            Statistics of all ranks' rows on ranks of the first replica and the last stage, zeros on others, so that
            those of the replicas add up.
        """
        self.graph.learning_rate.set_data(ms.Tensor(lr, ms.float32))
        if self.graph.gradients is None:
            total, norm = self._update_with_last(batch, kl_coefficient)
        else:
            total = np.zeros(1)
            for rows in batch.micro_batches:
                total = total + self._add(rows, kl_coefficient, batch.num_tokens)
            norm = self._call(self._step_rows(batch.micro_batches[-1]), 0.0, 1, is_last=True)[1]
        is_first_replica = self.model.layout.coordinates(self.model.rank).data == 0
        return LearnerUpdate(total if is_first_replica else np.zeros_like(total), norm, None)

    def _update_with_last(self, batch: Batch, kl_coefficient: float) -> tuple[np.ndarray, float]:
        total, norm = np.zeros(1), 0.0
        for index, rows in enumerate(batch.micro_batches):
            is_last = index == len(batch.micro_batches) - 1
            statistics, norm = self._call(rows, kl_coefficient, batch.num_tokens, is_last=is_last)
            total = total + statistics
        return total, norm

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint of all ranks, in bytes."""
        return self.model.size_bytes(self.graph.state)

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`SavesState.state_writer`: of shards of weights and optimiser state, wherever that is."""
        return self.model.state_writer(self.model_name, hold, self.graph.state)

    def restore(self, directory: str) -> None:
        """Take this rank's shard of a checkpoint, whatever the layout of the run that saved it."""
        self._have_state()
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
        """Return how the optimiser's state that this rank holds lies on the ranks."""
        held = self.model.held
        kinds = {one.name: [kind for kind in STATE_NAMES if f"{kind}.{one.name}" in self.graph.state] for one in held}
        return [*state_layouts(held, kinds), step_layout(self.model.layout)]

    def _call(
        self, rows: PackedRows, kl_coefficient: float, num_tokens: int, *, is_last: bool
    ) -> tuple[np.ndarray, float]:
        self._have_state()
        self.graph.is_last.set_data(ms.Tensor([float(is_last)], ms.float32))
        statistics, norm = self.graph.cell(*self._inputs(rows, kl_coefficient, num_tokens))
        return self._of_last_stage(statistics), float(norm.asnumpy()[0])

    def _add(self, rows: PackedRows, kl_coefficient: float, num_tokens: int) -> np.ndarray:
        """Add the gradients of a micro-batch; return its statistics."""
        if self._places is not None:
            self._places.have_for_gradients()
        statistics, _ = self.graph.gradients(*self._inputs(rows, kl_coefficient, num_tokens))
        return self._of_last_stage(statistics)

    def _of_last_stage(self, statistics: ms.Tensor) -> np.ndarray:
        values = statistics.asnumpy().astype(np.float64)
        return values if self.model.is_in_last_stage else np.zeros_like(values)

    def _have_state(self) -> None:
        if self._places is not None:
            self._places.have_for_step()

    def _step_rows(self, rows: PackedRows) -> PackedRows:
        """Return rows of weight 0, as many and as wide as these, and no longer than the layout needs."""
        length = step_length(self.model.layout)
        arrays = {name: np.zeros_like(getattr(rows, name)[:, :length]) for name in _ROW_ARRAYS}
        context = {name: np.zeros_like(array[:, :length]) for name, array in rows.context.items()}
        return replace(rows, **arrays, context=context, tokens={}, images=())

    def _inputs(self, rows: PackedRows, kl_coefficient: float, num_tokens: int) -> list[ms.Tensor]:
        unread = np.zeros_like(rows.mask)
        values = [self.model.per_token(rows.tokens.get(name, unread)) for name in self.graph.token_inputs]
        num_rows = len(rows.mask) * self.model.layout.data_parallel
        scalars = np.tile(np.array([[kl_coefficient, num_tokens]], np.float32), (num_rows, 1))
        num_micro_batches = self.model.num_update_micro_batches
        inputs = (*self.model.row_inputs(rows, num_micro_batches), *self.model.inputs(values, num_micro_batches))
        return [*inputs, ms.Tensor(scalars)]
