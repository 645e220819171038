"""What one rank does: hold the policy, compute log-probabilities, update, put its share of the weights on the board."""

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.config.sections import ModelSection, OptimizerSection, RunSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.models.causal_lm import CausalLM, build_model
from mindrlhf.observe.timing import peak_rss_gb
from mindrlhf.training.batch import unpack_share
from mindrlhf.training.cells import AccumulateGradients, OptimizerStep, make_accumulators, make_optimizer
from mindrlhf.training.runtime import Rank
from mindrlhf.weights.board import TensorInfo, WeightBoard
from mindrlhf.weights.convert import (
    hf_tensor_infos,
    iter_hf_tensors,
    load_hf_weights,
    load_random_weights,
)
from mindrlhf.weights.hf import read_hf_config


def load_model(model: ModelSection, path: str, run: RunSection, row_length: int) -> CausalLM:
    """Build the model of a Hugging Face directory and load its weights, or draw them from ``run.seed``.

    Raises:
        UserError: the directory, its config or its weights do not fit.
    """
    hf_config = read_hf_config(path)
    network = build_model(
        hf_config,
        seq_length=row_length,
        compute_dtype=model.compute_dtype,
        param_dtype=model.param_dtype,
        device=run.device,
    )
    if model.random_init:
        load_random_weights(network, run.seed)
    else:
        load_hf_weights(network, path)
    return network


class Learner:
    """A policy, a loss and an optimiser on one rank: what supervised and reinforcement learning share."""

    def __init__(self, network: CausalLM, loss: Any, optimizer: OptimizerSection, rank: Rank):
        self.rank = rank
        self.network = network
        loss.set_train(True)
        self.parameters = ms.ParameterTuple(network.trainable_params())
        accumulators = make_accumulators(self.parameters)
        self.gradients = AccumulateGradients(loss, self.parameters, accumulators)
        self.optimizer = make_optimizer(self.parameters, optimizer)
        self.step = OptimizerStep(self.optimizer, accumulators, optimizer.max_grad_norm, rank.world_size)
        self._shapes_seen: set[tuple[str, tuple[int, ...]]] = set()

    def apply(self, lr: float) -> float:
        """Update the weights from the accumulated gradients; return their global norm before clipping."""
        self.optimizer.learning_rate.set_data(ms.Tensor(lr, ms.float32))
        return float(self.step().asnumpy())

    def count_compile(self, graph: str, shape: tuple[int, ...]) -> None:
        """Note that ``graph`` runs on rows of ``shape``: a shape seen for the first time is a compilation."""
        self._shapes_seen.add((graph, shape))

    def process_statistics(self) -> dict[str, float]:
        """Return the compilations so far and the peak memory of this rank."""
        return {"recompiles": len(self._shapes_seen), "memory/peak_rss_gb": peak_rss_gb()}


class Actor(Learner):
    """The policy of a reinforcement learning run on one rank; its public methods are called through the team.

    Args:
        network: the policy.
        loss: cell with the signature of :class:`mindrlhf.algorithms.losses.GrpoLoss`.
        reference: the reference model, None when beta is 0.
        temperature: the sampling temperature of the rollout.
    """

    def __init__(
        self,
        network: CausalLM,
        loss: Any,
        optimizer: OptimizerSection,
        rank: Rank,
        *,
        reference: CausalLM | None,
        temperature: float,
        device: str,
    ):
        super().__init__(network, loss, optimizer, rank)
        self.logprobs_cell = loss.policy
        self.reference = reference
        self.reference_cell = PolicyLogProbs(reference, temperature, device) if reference else None
        self.board: WeightBoard | None = None
        self._batches: list[tuple[list[PackedRows], int]] = []

    def receive_batch(self, is_first: bool, **share: Any) -> None:
        """Take this rank's share of one optimiser update; ``is_first`` starts a new step."""
        if is_first:
            self._batches = []
        self._batches.append(unpack_share(share))

    def compute_logprobs(self, name: str, batch: int) -> dict[str, np.ndarray]:
        """Fill in ``name`` ("old_logprobs" or "reference_logprobs") for received batch number ``batch``.

        Returns:
            "<index>.logprobs" float32 [rows, length] for each micro-batch.
        """
        cell = self.logprobs_cell if name == "old_logprobs" else self.reference_cell
        results = {}
        for index, rows in enumerate(self._batches[batch][0]):
            self.count_compile(name, rows.input_ids.shape)
            rows.tokens[name] = cell(*_tensors(rows))[0].asnumpy().copy()
            results[f"{index}.logprobs"] = rows.tokens[name]
        return results

    def update(self, batch: int, lr: float) -> dict[str, Any]:
        """Make one optimiser update from received batch number ``batch``.

        Returns:
            "statistics" float64 [5], sums over this rank's tokens (``POLICY_STATISTICS``); "grad_norm"; and
            "<index>.logprobs" [rows, length] for each micro-batch, under the weights before the update.
        """
        micro_batches, num_tokens = self._batches[batch]
        results: dict[str, Any] = {}
        total = 0.0
        for index, rows in enumerate(micro_batches):
            self.count_compile("update", rows.input_ids.shape)
            unread = np.zeros_like(rows.mask)
            names = ("advantages", "old_logprobs", "reference_logprobs")
            values = [ms.Tensor(rows.tokens.get(name, unread)) for name in names]
            statistics, logprobs = self.gradients(*_tensors(rows), *values, ms.Tensor(num_tokens, ms.float32))
            total = total + statistics.asnumpy().astype(np.float64)
            results[f"{index}.logprobs"] = logprobs.asnumpy()
        return {"statistics": total, "grad_norm": self.apply(lr), **results, **self.process_statistics()}

    def create_board(self) -> WeightBoard:
        """Make the weight board of this node; the lead rank's part."""
        self.board = WeightBoard.create(
            TensorInfo(name, dtype, shape) for name, dtype, shape in hf_tensor_infos(self.network)
        )
        return self.board

    def attach_board(self, path: str) -> None:
        """Map the board that the lead created."""
        if self.board is None:
            self.board = WeightBoard.attach(path, writable=True)

    def publish(self, version: int) -> dict[str, Any]:
        """Write this rank's share of the tensors to the board; return what was written, for the seal."""
        self.board.begin(version)
        for name, array in iter_hf_tensors(self.network, self.rank.index, self.rank.world_size):
            self.board.write(name, array)
        return {"contribution": self.board.contribution()}

    def sync_reference(self) -> None:
        """Copy the policy into the reference model."""
        for target, source in zip(self.reference.get_parameters(), self.network.get_parameters()):
            target.set_data(ms.Tensor(source.asnumpy().copy()))


def _tensors(rows: PackedRows) -> tuple[ms.Tensor, ...]:
    return tuple(ms.Tensor(array) for array in (rows.input_ids, rows.segment_ids, rows.labels, rows.mask))


def sum_statistics(results: list[Mapping[str, Any]]) -> np.ndarray:
    """Add the ranks' statistics, float64."""
    return np.sum([result["statistics"] for result in results], axis=0)
