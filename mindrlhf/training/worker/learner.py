"""A model, a loss and an optimiser on one rank: what all ways of training share."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mindspore as ms
import numpy as np

from mindrlhf.checkpoint.optimizer import optimizer_arrays, optimizer_infos, restore_optimizer
from mindrlhf.checkpoint.state import MODEL_NAME, OPTIMIZER_NAME, StateWriter
from mindrlhf.config.training import OptimizerSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.models.context import run_graph
from mindrlhf.observe.timing import peak_rss_gb
from mindrlhf.shards.sources import ShardedSource, saved_state
from mindrlhf.system import speed_ups
from mindrlhf.training.batch import Batch, ProcessStatistics
from mindrlhf.training.checkpoints.shards import SavesState
from mindrlhf.training.optimizers import make_optimizer, matrices_of
from mindrlhf.training.runtime import Rank
from mindrlhf.training.worker.adapted_model import trained_model
from mindrlhf.training.worker.cell_dump import CellDump
from mindrlhf.training.worker.cells import AccumulateGradients, OptimizerStep, make_accumulators
from mindrlhf.training.worker.model import RankModel, model_tensors
from mindrlhf.weights.array_file import load_arrays, save_arrays
from mindrlhf.weights.open import is_sharded


class CountsCompiles:
    """The part of a worker that knows which shapes its graphs have seen."""

    def __init__(self) -> None:
        self._shapes_seen: set[tuple[str, tuple[int, ...]]] = set()

    def make_room(self) -> None:
        """Give up device memory that only an update needs; a learner that has a place for it overrides this."""

    def count_compile(self, graph: str, rows: PackedRows) -> None:
        """Note that ``graph`` runs on these rows: a shape seen for the first time is a compilation."""
        self._shapes_seen.add((graph, rows.input_ids.shape))

    def process_statistics(self) -> ProcessStatistics:
        """Return the compilations so far and the peak memory of this rank."""
        return ProcessStatistics(len(self._shapes_seen), peak_rss_gb())


class Learner(CountsCompiles, SavesState):
    """Accumulates gradients over micro-batches and updates the weights.

    Args:
        network: the trained model.
        loss: cell over a :class:`mindrlhf.algorithms.logprobs.PolicyLogProbs` called ``policy``; see
            :class:`mindrlhf.training.worker.cells.AccumulateGradients`.
        optimizer: the section `optimizer`.
        rank: this process.
        device: "cpu" or "ascend".
    """

    # Where a checkpoint has its weights, and the optimiser's state.
    model_name, optimizer_name = MODEL_NAME, OPTIMIZER_NAME

    def __init__(self, network: CausalLM, loss: Any, optimizer: OptimizerSection, rank: Rank, device: str):
        CountsCompiles.__init__(self)
        SavesState.__init__(self)
        self.network = network
        self.loss = loss
        self.model = trained_model(loss.policy, rank)
        loss.set_train(True)
        parameters = network.trainable_params()
        self._accumulators = accumulators = make_accumulators(parameters)
        accumulator_of = {parameter.name: target for parameter, target in zip(parameters, accumulators)}
        self.policy = loss.policy
        self._fast = speed_ups.of_rank(device)
        trained = self._fast.in_graph(loss, parameters) if self._fast else parameters
        # The last layer first, as the backward pass goes: MindSpore then uses and frees each gradient before the next.
        in_graph = ms.ParameterTuple(trained[::-1])
        assert len(in_graph), "the head's gradient comes with those of the layers: train one of their parameters too"
        targets = ms.ParameterTuple([accumulator_of[parameter.name] for parameter in in_graph])
        self._gradients = AccumulateGradients(loss, in_graph, targets)
        self._step = self._fast and self._fast.make_host_step(parameters, accumulators, optimizer, rank)
        if self._step is None:
            made = make_optimizer(parameters, optimizer, matrices_of(network))
            self._step = OptimizerStep(made, accumulators, optimizer.max_grad_norm, rank.world_size)
        self.optimizer = self._step.optimizer
        self._writes_moments = rank.is_rank_0  # of those that ranks share; each has the others to itself

    def count_compile(self, graph: str, rows: PackedRows) -> None:
        """See :meth:`CountsCompiles.count_compile`; images may be of the shape."""
        shape = rows.input_ids.shape
        if self.network.images is not None:
            shape += self.network.images.shape_of(rows.images)
        self._shapes_seen.add((graph, shape))

    def accumulate(self, rows: PackedRows, values: Sequence[np.ndarray], num_tokens: int) -> tuple[Any, np.ndarray]:
        """Add the gradients of one micro-batch.

        Args:
            rows: the micro-batch.
            values: the loss cell's further inputs, float32 [rows, length] or scalars.
            num_tokens: what the loss divides by: the response tokens of the whole update, over all ranks.

        Returns:
            The loss cell's statistics, float64, and log-probabilities, float32 [rows, length].
        """
        self.count_compile("update", rows)
        inputs = [ms.Tensor(value) for value in values]
        statistics, logprobs = run_graph(
            self._gradients, *model_tensors(self.network, rows), *inputs, ms.Tensor(num_tokens, ms.float32)
        )
        return statistics.asnumpy().astype(np.float64), logprobs.asnumpy()

    def apply(self, lr: float, loss: float = 0.0) -> float:
        """Update the weights from the accumulated gradients and clear them.

        Args:
            lr: learning rate.
            loss: this rank's part of the loss.

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
        """Yield name and accumulated gradient, float32, of each trained parameter of this rank, for a look at them."""
        self._collect()
        for parameter, accumulator in zip(self.network.trainable_params(), self._accumulators, strict=True):
            yield parameter.name, accumulator.asnumpy()

    def _collect(self) -> None:
        """Add up what lies outside the accumulators."""
        if self._fast:
            named = zip(self.network.trainable_params(), self._accumulators, strict=True)
            self._fast.collect_gradients(self.loss, {parameter.name: sums.asnumpy() for parameter, sums in named})

    def state_parameters(self) -> list[ms.Parameter]:
        """Return all that training keeps in device memory: weights, accumulated gradients, optimiser state."""
        held = (*self.network.get_parameters(), *self._accumulators, *self.optimizer.get_parameters())
        return list({id(parameter): parameter for parameter in held}.values())

    def export(self, directory: Path, tokenizer_dir: str | os.PathLike | None, tensors: None = None) -> None:
        """Write the weights as a Hugging Face directory; see :meth:`RankModel.export`."""
        self.model.export(directory, tokenizer_dir, tensors)

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint, in bytes: weights and optimiser state."""
        moments = sum(info.size_bytes for info in optimizer_infos(self.optimizer))
        return self.model.size_bytes() + moments

    def state_writer(self, hold: Callable) -> StateWriter:
        """Return the function that writes weights and optimiser state; ``hold`` takes a name and its arrays first."""
        infos = optimizer_infos(self.optimizer)
        write_weights = self.model.state_writer(self.model_name, hold)
        moments = hold(self.optimizer_name, optimizer_arrays(self.optimizer))

        def write(directory: Path) -> dict[str, str]:
            checksums = write_weights(directory)
            if checksum := save_arrays(directory / self.optimizer_name, moments, infos):
                checksums[self.optimizer_name] = checksum
            return checksums

        return write

    def restore(self, directory: str | os.PathLike) -> None:
        """Load what ``save`` wrote, or ranks that held shards."""
        model_dir = Path(directory) / self.model_name
        self.model.restore(model_dir)
        if is_sharded(model_dir):  # by ranks that held shards, of moments too
            state = saved_state(ShardedSource(model_dir))
        else:
            state = load_arrays(Path(directory) / self.optimizer_name)
        restore_optimizer(self.optimizer, state, writes_moments=self._writes_moments)
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


