"""A model, a loss and an optimiser on one rank: what all ways of training share."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.checkpoint.background import CopyBuffers
from mindrlhf.checkpoint.manifest import below
from mindrlhf.checkpoint.optimizer import optimizer_arrays, optimizer_infos, restore_optimizer
from mindrlhf.checkpoint.state import MODEL_NAME, OPTIMIZER_NAME, StateWriter
from mindrlhf.config.sections import ModelSection, OptimizerSection, RunSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.models.causal_lm import CausalLM, build_model
from mindrlhf.observe.timing import peak_rss_gb
from mindrlhf.shards.sources import ShardedSource, open_source, saved_state
from mindrlhf.training.runtime import Rank
from mindrlhf.training.worker.cells import AccumulateGradients, OptimizerStep, make_accumulators, make_optimizer
from mindrlhf.training.worker.host_optimizer import HostOptimizerStep
from mindrlhf.weights.array_file import load_arrays, save_arrays
from mindrlhf.weights.convert import export_hf, iter_hf_tensors, load_hf_weights, load_random_weights
from mindrlhf.weights.hf import read_hf_config


def load_model(model: ModelSection, path: str, run: RunSection, row_length: int) -> CausalLM:
    """Build the model of a Hugging Face directory and load its weights.

    With ``model.random_init`` those of ``model.path`` are drawn from ``run.seed``.

    Raises:
        UserError: the directory, its config or its weights do not fit.
    """
    network = build_model(
        read_hf_config(path),
        seq_length=row_length,
        compute_dtype=model.compute_dtype,
        param_dtype=model.param_dtype,
        device=run.device,
        recompute=model.recompute,
    )
    if model.random_init and path == model.path:
        load_random_weights(network, run.seed)
    else:
        load_hf_weights(network, path)
    return network


class Learner:
    """Accumulates gradients over micro-batches and updates the weights.

    Args:
        network: the trained model.
        loss: cell over a :class:`mindrlhf.algorithms.logprobs.PolicyLogProbs` called ``policy``; see
            :class:`mindrlhf.training.worker.cells.AccumulateGradients`.
        optimizer: options of AdamW.
        rank: this process.
        device: "cpu" or "ascend".
    """

    # Where a checkpoint has its weights, and the optimiser's state.
    model_name, optimizer_name = MODEL_NAME, OPTIMIZER_NAME

    def __init__(self, network: CausalLM, loss: Any, optimizer: OptimizerSection, rank: Rank, device: str):
        self.rank = rank
        self.network = network
        loss.set_train(True)
        parameters = network.trainable_params()
        self._accumulators = accumulators = make_accumulators(parameters)
        accumulator_of = {parameter.name: target for parameter, target in zip(parameters, accumulators)}
        self.optimizer = make_optimizer(parameters, optimizer)
        self.policy = loss.policy
        self._head_accumulator = accumulator_of[network.head_weight.name]
        in_graph = ms.ParameterTuple(self.policy.graph_parameters())
        targets = ms.ParameterTuple([accumulator_of[parameter.name] for parameter in in_graph])
        self._gradients = AccumulateGradients(loss, in_graph, targets)
        step = HostOptimizerStep if device == "cpu" else OptimizerStep
        self._step = step(self.optimizer, accumulators, optimizer.max_grad_norm, rank.world_size)
        self._shapes_seen: set[tuple[str, tuple[int, ...]]] = set()
        self._copies = CopyBuffers()

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
        self.policy.bind()
        inputs = [ms.Tensor(value) for value in values]
        statistics, logprobs = self._gradients(*row_tensors(rows), *inputs, ms.Tensor(num_tokens, ms.float32))
        return statistics.asnumpy().astype(np.float64), logprobs.asnumpy()

    def logprobs(self, policy: PolicyLogProbs, rows: PackedRows) -> np.ndarray:
        """Return the log-probabilities of one micro-batch under ``policy``, float32 [rows, length]."""
        policy.bind()
        return policy(*row_tensors(rows))[0].asnumpy().copy()

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
        self.policy.collect_weight_gradient(self._head_accumulator.asnumpy())
        if not math.isfinite(loss):
            # The sum over the ranks carries it to the others, who know only their own loss.
            smallest = min(self._accumulators, key=lambda accumulator: accumulator.size)
            smallest.set_data(ms.Tensor(np.full(smallest.shape, np.nan, np.float32)))
        return self._step()

    def gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and accumulated gradient, float32, of each trained parameter of this rank, for a look at them."""
        self.policy.collect_weight_gradient(self._head_accumulator.asnumpy())
        for parameter, accumulator in zip(self.network.trainable_params(), self._accumulators, strict=True):
            yield parameter.name, accumulator.asnumpy()

    def count_compile(self, graph: str, rows: PackedRows) -> None:
        """Note that ``graph`` runs on these rows: a shape seen for the first time is a compilation."""
        self._shapes_seen.add((graph, rows.input_ids.shape))

    def process_statistics(self) -> dict[str, float]:
        """Return the compilations so far and the peak memory of this rank."""
        return {"recompiles": len(self._shapes_seen), "memory/peak_rss_gb": peak_rss_gb()}

    def state_parameters(self) -> list[ms.Parameter]:
        """Return all that training keeps in device memory: weights, accumulated gradients, optimiser state."""
        held = (*self.network.get_parameters(), *self._accumulators, *self.optimizer.get_parameters())
        return list({id(parameter): parameter for parameter in held}.values())

    @property
    def param_dtype(self) -> str:
        """Dtype name of the trained parameters."""
        return str(self.network.head_weight.dtype).lower()

    def export(self, directory: Path, tokenizer_dir: str | os.PathLike | None) -> None:
        """Write the weights as a Hugging Face directory, in their own dtype."""
        export_hf(
            iter_hf_tensors(self.network),
            self.network.hf_config,
            directory,
            dtype=self.param_dtype,
            tokenizer_dir=tokenizer_dir,
        )

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint, in bytes: weights and both moments."""
        weights = sum(parameter.nbytes for parameter in self.network.get_parameters())
        return weights + sum(info.size_bytes for info in optimizer_infos(self.optimizer))

    def save(self, directory: Path) -> dict[str, str]:
        """Write weights and optimiser state; the lead rank's part, since all ranks hold the same.

        Returns:
            Checksums; see :data:`mindrlhf.checkpoint.state.StateWriter`.
        """
        return self.state_writer(lambda _, arrays: arrays)(directory)

    def capture(self) -> StateWriter:
        """Copy what ``save`` writes, and return the function that writes the copy, from any thread.

        The copy is valid until the next one.
        """
        return self.state_writer(self._copies.copy)

    def state_writer(self, hold: Callable) -> StateWriter:
        """Return the function that writes the state; ``hold`` takes a name and its arrays first."""
        network, dtype, infos = self.network, self.param_dtype, optimizer_infos(self.optimizer)
        weights = hold(self.model_name, iter_hf_tensors(network))
        moments = hold(self.optimizer_name, optimizer_arrays(self.optimizer))

        def write(directory: Path) -> dict[str, str]:
            checksums = export_hf(weights, network.hf_config, directory / self.model_name, dtype=dtype)
            checksums = below(self.model_name, checksums)
            if checksum := save_arrays(directory / self.optimizer_name, moments, infos):
                checksums[self.optimizer_name] = checksum
            return checksums

        return write

    def restore(self, directory: str | os.PathLike) -> None:
        """Load what ``save`` wrote, or ranks that held slices."""
        model_dir = Path(directory) / self.model_name
        load_hf_weights(self.network, model_dir)
        source = open_source(model_dir)
        # Ranks that held slices have saved slices, moments among them.
        is_sliced = isinstance(source, ShardedSource)
        state = saved_state(source) if is_sliced else load_arrays(Path(directory) / self.optimizer_name)
        restore_optimizer(self.optimizer, state)


def row_tensors(rows: PackedRows) -> tuple[ms.Tensor, ...]:
    """Return the four arrays that every cell takes first."""
    return tuple(ms.Tensor(array) for array in (rows.input_ids, rows.segment_ids, rows.labels, rows.mask))
