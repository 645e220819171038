"""What one rank does in reinforcement learning: log-probabilities, updates, its share of the weight board."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import POLICY_INPUTS, POLICY_STATISTICS
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.checkpoint.manifest import below
from mindrlhf.checkpoint.state import REFERENCE_NAME, StateWriter
from mindrlhf.config.sections import OptimizerSection
from mindrlhf.data.packing import padding_rows
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.training.records import PolicyUpdateResult, Published, Share, TokenArrays
from mindrlhf.training.runtime import Rank
from mindrlhf.training.worker.cell_dump import CellDump
from mindrlhf.training.worker.learner import Learner
from mindrlhf.training.worker.received_batches import ReceivedBatches
from mindrlhf.weights.board import TensorInfo, WeightBoard
from mindrlhf.weights.convert import export_hf, hf_tensor_infos, iter_hf_tensors, load_hf_weights


class Actor(ReceivedBatches, Learner):
    """The policy of a reinforcement learning run on one rank; its public methods are called through the team.

    Args:
        network: the policy.
        loss: cell with the signature of :class:`mindrlhf.algorithms.losses.PolicyLoss`.
        reference: log-probabilities under the reference model, None when beta is 0.
        saves_reference: the reference changes during the run, so checkpoints must hold it.
    """

    def __init__(
        self,
        network: CausalLM,
        loss: Any,
        optimizer: OptimizerSection,
        rank: Rank,
        device: str,
        reference: PolicyLogProbs | None,
        saves_reference: bool,
    ):
        ReceivedBatches.__init__(self)
        Learner.__init__(self, network, loss, optimizer, rank, device)
        self._reference = reference
        self._saves_reference = saves_reference
        self._board: WeightBoard | None = None
        self._reward_model: TokenScores | None = None
        self._cell_dump: CellDump | None = None

    def warm_up(self, row_lengths: list[int], rows_per_micro_batch: int, graphs: list[str]) -> None:
        """Compile the graphs for every row length on rows of weight 0, while the generator is still starting."""
        for length in row_lengths:
            rows = padding_rows((rows_per_micro_batch, length))
            self._batches = [Share((rows,), 1)]
            for name in graphs:
                self.compute_logprobs(name, 0)
            self.accumulate(rows, [*[rows.mask] * len(POLICY_INPUTS), np.float32(0.0)], 1)
        self._batches = []

    def compute_logprobs(self, name: str, batch: int) -> TokenArrays:
        """Fill in ``name`` ("old_logprobs" or "reference_logprobs") for received batch number ``batch``; return it."""
        cell = self.policy if name == "old_logprobs" else self._reference
        micro_batches = self._batches[batch].micro_batches
        if self._cell_dump is not None:
            stage = "old_log_prob" if name == "old_logprobs" else "reference"
            self._cell_dump.forward(stage, cell, micro_batches)
        for rows in micro_batches:
            self.count_compile(name, rows)
            rows.tokens[name] = self.logprobs(cell, rows)
        return TokenArrays(tuple(rows.tokens[name] for rows in micro_batches))

    def update(self, batch: int, lr: float, kl_coefficient: float) -> PolicyUpdateResult:
        """Make one optimiser update from received batch number ``batch``.

        Returns:
            Statistics [7] (``POLICY_STATISTICS``), and log-probabilities under the weights before the update. A norm
            that is not finite says that there was no update; see :meth:`Learner.apply`.
        """
        share = self._batches[batch]
        micro_batches, logprobs = share.micro_batches, []
        total = np.zeros(len(POLICY_STATISTICS))
        if self._cell_dump is not None:
            self._cell_dump.forward("update", self.policy, micro_batches)
        for rows in micro_batches:
            unread = np.zeros_like(rows.mask)
            values = [rows.tokens.get(name, unread) for name in POLICY_INPUTS]
            values.append(np.float32(kl_coefficient))
            statistics, computed = self.accumulate(rows, values, share.num_tokens)
            total += statistics
            logprobs.append(computed)
        if self._cell_dump is not None:
            self._cell_dump.gradients(self.policy, self.gradients())
        norm = self.apply(lr, loss=float(total[0]))
        return PolicyUpdateResult(total, norm, self.process_statistics(), tuple(logprobs))

    def use_reward_model(self, scores: TokenScores) -> None:
        """Take the model that ``score_responses`` runs."""
        self._reward_model = scores

    def score_responses(self, share: Share) -> TokenArrays:
        """Return the reward model's scores of a share."""
        scores = []
        for rows in share.micro_batches:
            self.count_compile("reward_model", rows)
            scores.append(self.logprobs(self._reward_model, rows))
        return TokenArrays(tuple(scores))

    def use_cell_dump(self, cell_dump: CellDump) -> None:
        """Take what writes the cells of the steps between ``begin_dump`` and ``end_dump``."""
        self._cell_dump = cell_dump

    def begin_dump(self, step: int) -> None:
        """Write the cells of what follows, as those of a step, from 1."""
        self._cell_dump.begin(step)

    def end_dump(self) -> None:
        """Write no more cells."""
        self._cell_dump.end()

    def create_board(self) -> WeightBoard:
        """Make the weight board of this node; the lead rank's part."""
        self._board = WeightBoard.create(TensorInfo(*info) for info in hf_tensor_infos(self.network))
        return self._board

    def attach_board(self, path: str) -> None:
        """Map the board that the lead created."""
        if self._board is None:
            self._board = WeightBoard.attach(path, writable=True)

    def publish(self, version: int) -> Published:
        """Write this rank's share of the tensors to the board."""
        self._board.begin(version)
        for name, array in iter_hf_tensors(self.network, self.rank.index, self.rank.world_size):
            self._board.write(name, array)
        return Published(self._board.contribution())

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint, in bytes; see :meth:`Learner.state_size_bytes`."""
        reference = self._reference.model.get_parameters() if self._saves_reference else ()
        return super().state_size_bytes() + sum(parameter.nbytes for parameter in reference)

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`Learner.state_writer`; with the reference, if that changes."""
        write_policy = super().state_writer(hold)
        if not self._saves_reference:
            return write_policy
        model, dtype = self._reference.model, self.param_dtype
        weights = hold(REFERENCE_NAME, iter_hf_tensors(model))

        def write(directory: Path) -> dict[str, str]:
            checksums = write_policy(directory)
            reference = export_hf(weights, model.hf_config, directory / REFERENCE_NAME, dtype=dtype)
            return checksums | below(REFERENCE_NAME, reference)

        return write

    def restore(self, directory: str) -> None:
        """Load what ``save`` wrote."""
        super().restore(directory)
        if self._saves_reference:
            load_hf_weights(self._reference.model, Path(directory) / REFERENCE_NAME)

    def sync_reference(self) -> None:
        """Copy the policy into the reference model."""
        for target, source in zip(self._reference.model.get_parameters(), self.network.get_parameters(), strict=True):
            target.set_data(ms.Tensor(source.asnumpy().copy()))
