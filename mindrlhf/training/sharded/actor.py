"""What one rank does in reinforcement learning of a model that is cut over the ranks.

See mindrlhf.training.worker.actor.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.state import MODEL_NAME, OPTIMIZER_NAME, REFERENCE_NAME, StateWriter
from mindrlhf.data.packing import PackedRows, padding_rows
from mindrlhf.observe.timing import peak_rss_gb
from mindrlhf.shards.sources import ArraySource, open_source
from mindrlhf.specs import ParameterRule
from mindrlhf.training.checkpoints.slices import SavesSlices
from mindrlhf.training.records import PolicyUpdateResult, ProcessStatistics, Published, Share, TokenArrays
from mindrlhf.training.sharded.learner import ParallelLearner, SlicedModel
from mindrlhf.training.worker.received_batches import ReceivedBatches
from mindrlhf.weights.board import TensorInfo, WeightBoard
from mindrlhf.weights.convert import export_hf, hf_tensor_infos
from mindrlhf.weights.publishing import plan_publication, write_slices


class ParallelActor(ReceivedBatches, SavesSlices):
    """The policy on one rank that holds slices of it; its public methods are called through the team.

    Args:
        learner: the policy.
        reference: the reference model's slices, None when beta is 0.
        saves_reference: the reference changes during the run, so checkpoints must hold it.
    """

    def __init__(self, learner: ParallelLearner, reference: SlicedModel | None, saves_reference: bool):
        ReceivedBatches.__init__(self)
        SavesSlices.__init__(self)
        self.learner = learner
        self.model = learner.model
        self._reference = reference
        self._saves_reference = saves_reference
        self._board: WeightBoard | None = None
        self._publication = self._plan_publication()
        self._old_logprobs: dict[tuple[int, int], np.ndarray] = {}  # by batch and micro-batch
        self._shapes_seen: set[tuple[str, tuple[int, ...]]] = set()

    def prepare(
        self,
        row_lengths: tuple[int, ...],
        rows_per_micro_batch: int,
        source: ArraySource,
        reference: ArraySource | None,
    ) -> None:
        """Compile every graph, and then load the slices, whose shapes are known by then."""
        for length in row_lengths:
            rows = padding_rows((rows_per_micro_batch, length))
            for name, model in (("old_logprobs", self.model), ("reference_logprobs", self._reference)):
                if model is not None:
                    self._count_compile(name, rows)
                    model.compile(rows)
            # Last, so that MindSpore's strategy file is that of the update, which has the optimiser's state.
            self._count_compile("update", rows)
            self.learner.compile(rows)
        self.model.load(source)
        if self._reference is not None:
            self._reference.load(reference)

    def receive_batch(self, share: Share, is_first: bool) -> None:
        """Take this rank's share; see :meth:`ReceivedBatches.receive_batch`."""
        if is_first:
            self._old_logprobs = {}
        super().receive_batch(share, is_first)

    def warm_up(self, row_lengths: list[int], rows_per_micro_batch: int, graphs: list[str]) -> None:
        """Run the compiled graphs on rows of weight 0, while the generator is still starting."""
        for length in row_lengths:
            rows = padding_rows((rows_per_micro_batch, length))
            for name in graphs:
                self._model_of(name).logprobs(rows)
            self.learner.warm_up(rows)

    def compute_logprobs(self, name: str, batch: int) -> TokenArrays:
        """Fill in ``name`` ("old_logprobs" or "reference_logprobs") for received batch number ``batch``; return it.

        Zeros before the last pipeline stage.
        """
        micro_batches = self._batches[batch].micro_batches
        for index, rows in enumerate(micro_batches):
            self._count_compile(name, rows)
            rows.tokens[name] = self._model_of(name).logprobs(rows)
            if name == "old_logprobs":
                self._old_logprobs[batch, index] = rows.tokens[name]
        return TokenArrays(tuple(rows.tokens[name] for rows in micro_batches))

    def update(self, batch: int, lr: float, kl_coefficient: float) -> PolicyUpdateResult:
        """Make one optimiser update from received batch number ``batch``.

        Returns:
            Statistics [7]: sums over the tokens of all ranks on ranks of the first replica, zeros on others, so that
            they add up; and log-probabilities under the weights before the first update of the step, which a pass of
            its own computes unless it was asked for before.
        """
        share, logprobs = self._batches[batch], []
        for index, rows in enumerate(share.micro_batches):
            if (batch, index) not in self._old_logprobs:
                self._old_logprobs[batch, index] = self.model.logprobs(rows)
            logprobs.append(self._old_logprobs[batch, index])
        result = self.learner.update(share.micro_batches, share.num_tokens, lr, kl_coefficient)
        is_first = self.model.layout.coordinates(self.model.rank).data == 0
        statistics = result.statistics if is_first else np.zeros_like(result.statistics)
        return PolicyUpdateResult(statistics, result.grad_norm, self._process_statistics(), tuple(logprobs))

    def create_board(self) -> WeightBoard:
        """Make the weight board of this node; the lead rank's part."""
        self._board = WeightBoard.create(TensorInfo(*info) for info in hf_tensor_infos(self.model.network))
        return self._board

    def attach_board(self, path: str) -> None:
        """Map the board that the lead created."""
        if self._board is None:
            self._board = WeightBoard.attach(path, writable=True)

    def publish(self, version: int) -> Published:
        """Write what this rank holds, and no other rank writes, to the board."""
        self._board.begin(version)
        for name, array in self.model.slices():
            if name in self._publication:
                write_slices(self._board, {name: self._publication[name]}, {name: array})
        return Published(self._board.contribution())

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint of all ranks, in bytes."""
        reference = self.model.size_bytes(with_state=False) if self._saves_reference else 0
        return reference + self.model.size_bytes(with_state=True)

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`SavesSlices.state_writer`: of slices of weights and optimiser state."""
        writers = [self.model.state_writer(MODEL_NAME, hold, self.learner.optimizer)]
        if self._saves_reference:
            writers.append(self._reference.state_writer(REFERENCE_NAME, hold))
        return lambda directory: {name: value for write in writers for name, value in write(directory).items()}

    def restore(self, directory: str) -> None:
        """Take this rank's slices of a checkpoint, whatever the layout of the run that saved it."""
        source = open_source(Path(directory) / MODEL_NAME, _if_there(Path(directory) / OPTIMIZER_NAME))
        self.model.load(source)
        self.learner.restore_optimizer(source)
        if self._saves_reference:
            self._reference.load(open_source(Path(directory) / REFERENCE_NAME))

    def export(self, directory: Path, tokenizer_dir: str | os.PathLike | None) -> None:
        """Write the published weights as a Hugging Face directory; the lead's part, which has the board of its node."""
        assert self._board is not None and self._board.version is not None, "nothing was published"
        tensors = ((name, array) for name, _, array in self._board.tensors(self._board.version))
        export_hf(tensors, self.model.network.hf_config, directory, dtype=self.model.dtype, tokenizer_dir=tokenizer_dir)

    def sync_reference(self) -> None:
        """Copy the policy into the reference model, slice by slice."""
        self._reference.copy_from(self.model)

    def _model_of(self, name: str) -> SlicedModel:
        return self.model if name == "old_logprobs" else self._reference

    def _plan_publication(self) -> dict:
        network = self.model.network
        rules: dict[str, ParameterRule] = {rule.mf_name: rule for rule in network.spec.rules(network.dims)}
        return plan_publication(self.model.layouts, rules, network.dims, self.model.rank)

    def _count_compile(self, graph: str, rows: PackedRows) -> None:
        self._shapes_seen.add((graph, rows.input_ids.shape))

    def _process_statistics(self) -> ProcessStatistics:
        return ProcessStatistics(len(self._shapes_seen), peak_rss_gb())


def _if_there(path: Path) -> Path | str:
    return path if path.is_file() else ""
