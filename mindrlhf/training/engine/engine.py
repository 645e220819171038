"""Per-rank training engine, and that of an unsharded model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.losses import Loss
from mindrlhf.checkpoint.state import MODEL_NAME
from mindrlhf.config.training import OptimizerSection
from mindrlhf.cpu.training.heads import collect_gradients, differentiated
from mindrlhf.cpu.training.host_optimizer import HostOptimizerStep
from mindrlhf.data.packing import PackedRows
from mindrlhf.models.context import run_graph
from mindrlhf.observe.timing import peak_rss_gb
from mindrlhf.training.batch import Batch
from mindrlhf.training.checkpoints import models
from mindrlhf.training.engine.cells import AccumulateGradients, OptimizerStep, SumOverRanks, make_accumulators
from mindrlhf.training.engine.model import Model, model_tensors
from mindrlhf.training.optimizers import make_optimizer, matrices_of, optimizer_state
from mindrlhf.training.results import ProcessStatistics, UpdateResult

if TYPE_CHECKING:
    from mindrlhf.training.runtime import Rank


class Engine:
    """A model that is trained, on one rank: what it says of rows, its updates, its optimiser's state, its checkpoints.

    It is a :class:`WholeEngine`, or where the model is sharded a
    :class:`mindrlhf.training.engine.sharded_updates.ShardedEngine`.

    Args:
        model: what is trained.
        inputs: names of the token arrays that the loss takes, in order.
        state: parameters that hold the optimiser's state, by their names in a checkpoint; see
            :func:`mindrlhf.training.optimizers.optimizer_state`.
        name: of the directory of a checkpoint that has its weights and that state.

    Attributes:
        returns_outputs: updates return what the model said of their rows before.
    """

    returns_outputs = True

    def __init__(
        self, model: Model, inputs: tuple[str, ...], state: Mapping[str, ms.Parameter], name: str = MODEL_NAME
    ):
        self.model = model
        self.placement = model.placement
        self.inputs = inputs
        self.state = state
        self.name = name
        self._shapes_seen: set[tuple[str, tuple[int, ...]]] = set()

    def count_compile(self, graph: str, rows: PackedRows) -> None:
        """Note that ``graph`` runs on these rows: a shape seen first is a compilation."""
        self._shapes_seen.add((graph, rows.input_ids.shape))

    def process_statistics(self) -> ProcessStatistics:
        """Return the compilations so far and the peak memory of this rank."""
        return ProcessStatistics(len(self._shapes_seen), peak_rss_gb())

    def outputs(self, name: str, rows: PackedRows) -> np.ndarray:
        """Return log-probabilities, values or scores ``name`` of one micro-batch; see :meth:`Model.logprobs`."""
        self.count_compile(name, rows)
        return self.model.logprobs(rows)

    def graphs(self, rows: PackedRows) -> Sequence[tuple[str, PackedRows]]:
        """Return the graphs that an update with such rows runs, by name, and rows of the shape of each."""
        return [("update", rows)]

    def warm_up(self, rows: PackedRows) -> None:
        """Run the graphs of an update on rows of weight 0, which changes nothing."""
        self.count_update(rows)
        self.run_once(rows)

    def run_once(self, rows: PackedRows) -> None:
        raise NotImplementedError

    def update(self, batch: Batch, lr: float, kl_coefficient: float = 0.0) -> UpdateResult:
        """Make one optimiser update, which is none where a norm or a loss is not finite.

        Its log-probabilities are what the model said, whatever that is, where ``returns_outputs``.
        """
        for rows in batch.micro_batches:
            self.count_update(rows)
        return self.make_update(batch, lr, kl_coefficient)

    def make_update(self, batch: Batch, lr: float, kl_coefficient: float) -> UpdateResult:
        raise NotImplementedError

    def count_update(self, rows: PackedRows) -> None:
        """Note the graphs that an update with such rows runs."""
        for name, shaped in self.graphs(rows):
            self.count_compile(name, shaped)

    def gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and accumulated gradient, float32, of each trained parameter that this rank holds, to look at."""
        raise NotImplementedError

    def have_state(self) -> None:
        """Have all that an update needs on the device."""

    def restore(self, directory: str | Path) -> None:
        """Load this rank's shards of weights and optimiser state from a checkpoint of any layout."""
        self.have_state()
        models.restore(self.placement, Path(directory) / self.name, self.state)

    def make_room(self) -> None:
        """Give up device memory that only an update needs; on a CPU device and host are one."""

    def state_parameters(self) -> list[ms.Parameter]:
        """Return all that training keeps in device memory: weights, accumulated gradients, optimiser state."""
        held = (*self.model.network.get_parameters(), *self.training_parameters())
        return list({id(parameter): parameter for parameter in held}.values())

    def training_parameters(self) -> Sequence[ms.Parameter]:
        """Return what training keeps in device memory beside the weights."""
        raise NotImplementedError


class WholeEngine(Engine):
    """Accumulates gradients over micro-batches and updates the weights of a model that is whole."""

    def __init__(self, model: Model, loss: Loss, options: OptimizerSection, rank: "Rank", name: str = MODEL_NAME):
        self.network = model.network
        self.optimizer = make_optimizer(self.network.trainable_params(), options, matrices_of(self.network))
        super().__init__(model, loss.inputs, optimizer_state(self.optimizer), name)
        self.loss = loss
        loss.set_train(True)
        parameters = self.network.trainable_params()
        self._accumulators = accumulators = make_accumulators(parameters)
        accumulator_of = {parameter.name: target for parameter, target in zip(parameters, accumulators)}
        # The last layer first, as the backward pass goes: MindSpore then uses and frees each gradient before the next.
        in_graph = ms.ParameterTuple(differentiated(loss, parameters)[::-1])
        assert len(in_graph), "the head's gradient comes with those of the layers: train one of their parameters too"
        targets = ms.ParameterTuple([accumulator_of[parameter.name] for parameter in in_graph])
        self._gradients = AccumulateGradients(loss, in_graph, targets)
        if options.type == "adamw":
            reduce = SumOverRanks(accumulators) if rank.world_size > 1 else None
            self._step = HostOptimizerStep(self.optimizer, accumulators, options.max_grad_norm, reduce)
        else:
            self._step = OptimizerStep(self.optimizer, accumulators, options.max_grad_norm, rank.world_size)

    def run_once(self, rows: PackedRows) -> None:
        self.add(rows, 1)

    def add(self, rows: PackedRows, num_tokens: int, kl_coefficient: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Add the gradients of one micro-batch.

        Args:
            rows: the micro-batch.
            num_tokens: what the loss divides by: the response tokens of the whole update, over all ranks.
            kl_coefficient: weight of the KL term.

        Returns:
            The loss's statistics, float64, and the model's outputs, float32 [rows, length].
        """
        given = [ms.Tensor(array) for array in self.loss.token_arrays(rows.tokens, rows.mask)]
        scalars = [ms.Tensor(value, ms.float32) for value in (kl_coefficient, num_tokens)]
        statistics, outputs = run_graph(self._gradients, *model_tensors(self.network, rows), *given, *scalars)
        return statistics.asnumpy().astype(np.float64), outputs.asnumpy()

    def make_update(self, batch: Batch, lr: float, kl_coefficient: float) -> UpdateResult:
        """Make one optimiser update; statistics are sums over this rank's tokens."""
        total, outputs = np.zeros(len(self.loss.statistics)), []
        for rows in batch.micro_batches:
            statistics, computed = self.add(rows, batch.num_tokens, kl_coefficient)
            total += statistics
            outputs.append(computed)
        norm = self.apply(lr, loss=float(total[0]))
        return UpdateResult(total, norm, self.process_statistics(), tuple(outputs))

    def apply(self, lr: float, loss: float = 0.0) -> float:
        """Update the weights from the accumulated gradients and clear them.

        Returns:
            The global norm of the gradients before clipping. When it, or the loss of any rank, is not finite, the norm
            is not finite on every rank, and nothing was updated.
        """
        self.optimizer.learning_rate.set_data(ms.Tensor(lr, ms.float32))
        self._collect()
        if not math.isfinite(loss):
            # The sum over the ranks carries it to the others, who know only their own loss.
            smallest = min(self._accumulators, key=lambda accumulator: accumulator.size)
            smallest.set_data(ms.Tensor(np.full(smallest.shape, np.nan, np.float32)))
        return self._step()

    def gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        self._collect()
        for parameter, accumulator in zip(self.network.trainable_params(), self._accumulators, strict=True):
            yield parameter.name, accumulator.asnumpy()

    def _collect(self) -> None:
        """Add up what lies outside the accumulators."""
        named = zip(self.network.trainable_params(), self._accumulators, strict=True)
        collect_gradients(self.loss, {parameter.name: sums for parameter, sums in named})

    def training_parameters(self) -> list[ms.Parameter]:
        return [*self._accumulators, *self.optimizer.get_parameters()]
