"""The updates of a sharded model: what a rank puts into the graph of an update, and the optimiser's state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.losses import POLICY_INPUTS
from mindrlhf.checkpoint.state import MODEL_NAME
from mindrlhf.config.memory import MemorySection
from mindrlhf.data.packing import PackedRows
from mindrlhf.layout.rows import step_length
from mindrlhf.training.batch import Batch
from mindrlhf.training.engine.engine import Engine
from mindrlhf.training.engine.model import Model
from mindrlhf.training.engine.offload import OptimizerPlaces
from mindrlhf.training.engine.sharded_cells import ParallelGradients, ParallelUpdate
from mindrlhf.training.optimizers import optimizer_state
from mindrlhf.training.results import UpdateResult

_ROW_ARRAYS = ("input_ids", "segment_ids", "labels", "mask")


@dataclass(frozen=True)
class UpdateGraph:
    """The graph of an update, and the parameters in it that the host reads and sets.

    It is the product's own cell (:meth:`of`), or one that was compiled elsewhere.

    Attributes:
        cell: takes this rank's four row arrays, those of ``token_inputs``, and ``scalars`` (see
            :class:`mindrlhf.training.engine.sharded_losses.ShardedLoss`); returns statistics, the gradient norm [1]
            and outputs, as :class:`mindrlhf.training.engine.sharded_cells.ParallelUpdate` does.
        learning_rate: float32 scalar, set before an update.
        is_last: float32 [1], set before each call: 1 makes the update.
        state: the optimiser's, with its step count, of this rank (more do no harm), by their names in a checkpoint
            (:func:`mindrlhf.training.optimizers.optimizer_state`).
        token_inputs: names of the token arrays that the loss takes, in order.
        gradients: takes what ``cell`` does and adds gradients without touching ``state``: the calls of an update before
            its last one. None: all go to ``cell``.
        steps_apart: ``cell`` takes no micro-batch, but makes the update from a short row of weight 0.
        returns_outputs: both return the model's outputs too.
        totals: gradients added up so far, by the name of a trained parameter.
        parameters: all that training keeps on the device beside the weights.
    """

    cell: Callable[..., tuple[ms.Tensor, ...]]
    learning_rate: ms.Parameter
    is_last: ms.Parameter
    state: Mapping[str, ms.Parameter]
    token_inputs: tuple[str, ...] = POLICY_INPUTS
    gradients: Callable[..., tuple[ms.Tensor, ...]] | None = None
    steps_apart: bool = False
    returns_outputs: bool = True
    totals: Mapping[str, ms.Parameter] = field(default_factory=dict)
    parameters: Sequence[ms.Parameter] = ()

    @classmethod
    def of(cls, update: ParallelUpdate, memory: MemorySection, inputs: tuple[str, ...]) -> "UpdateGraph":
        """Return that of a cell of the product, whose loss reads ``inputs``."""
        optimizer = update.optimizer
        return cls(
            cell=update,
            learning_rate=optimizer.learning_rate,
            is_last=update.is_last,
            state=optimizer_state(optimizer),
            token_inputs=inputs,
            gradients=ParallelGradients(update),
            steps_apart=memory.swap_moments,
            returns_outputs=update.returns_outputs,
            totals={weight.name: total for weight, total in zip(update.weights, update.totals, strict=True)},
            parameters=list(update.get_parameters()),
        )


class ShardedEngine(Engine):
    """Updates a sharded model from micro-batches of this rank's rows; see :class:`Engine`."""

    def __init__(self, model: Model, graph: UpdateGraph, places: OptimizerPlaces | None = None, name: str = MODEL_NAME):
        super().__init__(model, graph.token_inputs, graph.state, name)
        self.graph = graph
        self.returns_outputs = graph.returns_outputs
        self._places = places

    def have_state(self) -> None:
        if self._places is not None:
            self._places.have_for_step()

    def make_room(self) -> None:
        if self._places is not None:
            self._places.make_room()

    def graphs(self, rows: PackedRows) -> Sequence[tuple[str, PackedRows]]:
        if self.graph.gradients is None:
            return [("update", rows)]
        return [("gradients", rows), ("update", self._step_rows(rows) if self.graph.steps_apart else rows)]

    def compile(self, rows: PackedRows) -> None:
        """Compile the update for the shape of ``rows``; its cells must be MindSpore's."""
        for name, shaped in self.graphs(rows):
            self.count_compile(name, shaped)
            cell = self.graph.cell if name == "update" else self.graph.gradients
            cell.compile(*self._inputs(shaped, 0.0, 1))

    def run_once(self, rows: PackedRows) -> None:
        for name, shaped in self.graphs(rows):
            if name == "update":
                self._call(shaped, 0.0, 1, is_last=False)
            else:
                self._add(shaped, 0.0, 1)

    def add(self, rows: PackedRows, num_tokens: int, kl_coefficient: float) -> tuple[np.ndarray, None]:
        """Add the gradients of one micro-batch; see :meth:`WholeEngine.add`."""
        return self._of_last_stage(self._call(rows, kl_coefficient, num_tokens, is_last=False)[0]), None

    def gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((name, total.asnumpy()) for name, total in self.graph.totals.items() if name in self.placement.held)

    def training_parameters(self) -> Sequence[ms.Parameter]:
        return self.graph.parameters

    def make_update(self, batch: Batch, lr: float, kl_coefficient: float) -> UpdateResult:
        """Make one optimiser update; there are as many micro-batches on every rank.

        Statistics are of all ranks' rows on ranks of the first replica and the last stage, zeros on others, so that
        those of the replicas add up.
        """
        self.graph.learning_rate.set_data(ms.Tensor(lr, ms.float32))
        graph, calls = self.graph, []
        for index, rows in enumerate(batch.micro_batches, 1):
            is_last = index == len(batch.micro_batches) and not graph.steps_apart
            if is_last or graph.gradients is None:
                calls.append(self._call(rows, kl_coefficient, batch.num_tokens, is_last=is_last))
            else:
                calls.append(self._add(rows, kl_coefficient, batch.num_tokens))
        ended = calls[-1]
        if graph.steps_apart:
            ended = self._call(self._step_rows(batch.micro_batches[-1]), 0.0, 1, is_last=True)
        # Read only now: the device need not wait for the host between calls.
        total = sum(self._of_last_stage(statistics) for statistics, *_ in calls)
        outputs = ()
        if self.returns_outputs:
            found = zip(calls, batch.micro_batches)
            outputs = tuple(self.placement.own_outputs(call[2:], rows) for call, rows in found)
        is_first_replica = self.placement.layout.coordinates(self.placement.rank).data == 0
        norm = float(ended[1].asnumpy()[0])
        statistics = total if is_first_replica else np.zeros_like(total)
        return UpdateResult(statistics, norm, self.process_statistics(), outputs)

    def _call(
        self, rows: PackedRows, kl_coefficient: float, num_tokens: int, *, is_last: bool
    ) -> tuple[ms.Tensor, ...]:
        self.have_state()
        self.graph.is_last.set_data(ms.Tensor([float(is_last)], ms.float32))
        return self.graph.cell(*self._inputs(rows, kl_coefficient, num_tokens))

    def _add(self, rows: PackedRows, kl_coefficient: float, num_tokens: int) -> tuple[ms.Tensor, ...]:
        """Add the gradients of a micro-batch."""
        if self._places is not None:
            self._places.have_for_gradients()
        return self.graph.gradients(*self._inputs(rows, kl_coefficient, num_tokens))

    def _of_last_stage(self, statistics: ms.Tensor) -> np.ndarray:
        values = statistics.asnumpy().astype(np.float64)
        return values if self.placement.is_in_last_stage else np.zeros_like(values)

    def _step_rows(self, rows: PackedRows) -> PackedRows:
        """Return rows of weight 0, as many and as wide as these, and no longer than the layout needs."""
        length = step_length(self.placement.layout)
        arrays = {name: np.zeros_like(getattr(rows, name)[:, :length]) for name in _ROW_ARRAYS}
        context = {name: np.zeros_like(array[:, :length]) for name, array in rows.context.items()}
        return replace(rows, **arrays, context=context, tokens={}, images=())

    def _inputs(self, rows: PackedRows, kl_coefficient: float, num_tokens: int) -> list[ms.Tensor]:
        placement, unread = self.placement, np.zeros_like(rows.mask)
        values = [placement.per_token(rows.tokens.get(name, unread)) for name in self.inputs]
        num_rows = len(rows.mask) * placement.layout.data_parallel
        scalars = np.tile(np.array([[kl_coefficient, num_tokens]], np.float32), (num_rows, 1))
        number = placement.num_update_micro_batches
        return [*placement.row_inputs(rows, number), *placement.inputs(values, number), ms.Tensor(scalars)]
