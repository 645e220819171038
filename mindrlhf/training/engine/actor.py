"""The worker of a rank in reinforcement learning: log-probabilities, updates, its share of the weight buffer."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.checkpoint.state import REFERENCE_NAME, StateWriter
from mindrlhf.data.packing import PackedRows
from mindrlhf.models.context import give_back_memory
from mindrlhf.system import heartbeat
from mindrlhf.system.files import remove
from mindrlhf.training.batch import Batch
from mindrlhf.training.checkpoints import models
from mindrlhf.training.checkpoints.shards import SavesState
from mindrlhf.training.engine.engine import Engine
from mindrlhf.training.engine.model import Model
from mindrlhf.training.placement import Placement
from mindrlhf.training.results import ProcessStatistics, UpdateResult
from mindrlhf.training.routing.rows import without_experts
from mindrlhf.training.serving import ServingWorker
from mindrlhf.weights.publish.publisher import PUBLISH, Published

if TYPE_CHECKING:
    from mindrlhf.debugging.kernel_dump import KernelDump
    from mindrlhf.weights.publish.collective import Broadcast


class Actor(SavesState, ServingWorker):
    """The policy of a reinforcement learning run on one rank; its public methods are called through the team.

    Args:
        engine: of the policy.
        reference: the reference model or the teacher; None when beta is 0.
        saves_reference: the reference changes during the run, so checkpoints must hold it.
        reward_model: what ``score_responses`` runs.
        kernel_dump: begins a step when its batches come.
    """

    def __init__(
        self,
        engine: Engine,
        reference: Model | None = None,
        *,
        saves_reference: bool = False,
        reward_model: Model | None = None,
        kernel_dump: "KernelDump | None" = None,
    ):
        SavesState.__init__(self)
        ServingWorker.__init__(self, engine.model)
        self.engine = engine
        self.reference = reference
        self._saves_reference = saves_reference
        self._reward_model = reward_model
        self._kernel_dump = kernel_dump
        self._batches: list[Batch] = []  # this rank's part of the updates of a step
        self._old_logprobs: dict[int, list[np.ndarray]] = {}  # of the step, by batch

    def warm_up(self, shapes: list[PackedRows], graphs: list[str]) -> None:
        """Run the graphs on rows of weight 0, for every shape there is, while the generator is still starting."""
        for rows in shapes:
            size = f"sequences of {rows.labels.shape[1]} tokens"
            for name in graphs:
                heartbeat.enter(f"compiling {name} for {size}")
                self._computed(name, rows)
            heartbeat.enter(f"compiling the update for {size}")
            self.engine.warm_up(rows)

    def receive(self, batches: list[Batch]) -> None:
        """Take this rank's part of the updates of a step, with all that is known of them before it computes."""
        if self._kernel_dump is not None:
            self._kernel_dump.begin_step()
        self._batches, self._old_logprobs = batches, {}
        # An image that several updates look at is one.
        images = {digest: image for batch in batches for digest, image in batch.images.items()}
        if images:
            self.see(tuple(images.values()))

    def see(self, images: tuple[np.ndarray, ...]) -> None:
        """Show the models the images, uint8 [height, width, 3] each, of this rank's rows of a step."""
        self.model.see(images)
        if self.reference is not None:
            self.reference.see(images)

    def receive_tokens(self, name: str, arrays: list[list[np.ndarray]]) -> None:
        """Take float32 [rows, length] called ``name`` for each micro-batch of each received batch."""
        for batch, own in zip(self._batches, arrays, strict=True):
            for rows, array in zip(batch.micro_batches, own, strict=True):
                rows.tokens[name] = array

    def held_rows(self, batch: int) -> list[PackedRows]:
        """Return the micro-batches of received batch number ``batch``, with all that they were given since."""
        return list(self._batches[batch].micro_batches)

    def compute_logprobs(self, name: str, batch: int) -> list[np.ndarray]:
        """Fill in ``name`` ("old_logprobs" or "reference_logprobs") for received batch number ``batch``; return it."""
        micro_batches = self._batches[batch].micro_batches
        for rows in micro_batches:
            rows.tokens.update(self._computed(name, rows))
        computed = [rows.tokens[name] for rows in micro_batches]
        if name == "old_logprobs":
            self._old_logprobs[batch] = computed
        return computed

    def update(self, batch: int, lr: float, kl_coefficient: float) -> UpdateResult:
        """Make one optimiser update from received batch number ``batch``.

        Returns:
            Statistics [7] (``POLICY_STATISTICS``), the norm, which is not finite when there was no update, and
            log-probabilities. These are under the weights before the update; or where updates do not return them,
            before the first update of the step, by a pass of their own unless they were asked for before.
        """
        own = self._batches[batch]
        if not self.engine.returns_outputs and batch not in self._old_logprobs:
            self._old_logprobs[batch] = [self.model.logprobs(rows) for rows in own.micro_batches]
        done = self.engine.update(own, lr, kl_coefficient)
        # Also of a rank that has no rows: what it returns is empty, and what it computed before nothing.
        logprobs = done.logprobs if self.engine.returns_outputs else tuple(self._old_logprobs[batch])
        return replace(done, process=self.process_statistics(), logprobs=logprobs)

    def process_statistics(self) -> ProcessStatistics:
        return self.engine.process_statistics()

    def score_responses(self, batch: Batch) -> list[np.ndarray]:
        """Return the reward model's scores, float32 [rows, length], of each micro-batch."""
        for rows in batch.micro_batches:
            self.engine.count_compile("reward_model", rows)
        return [self._reward_model.logprobs(rows) for rows in batch.micro_batches]

    def publish(self, version: int, bucket: int = 0, purpose: str = PUBLISH) -> Published:
        """See :meth:`PublishingWorker.publish`; what follows is the generator's turn."""
        published = super().publish(version, bucket, purpose)
        self.engine.make_room()
        give_back_memory()
        return published

    def export(
        self,
        directory: Path,
        tokenizer_dir: str | os.PathLike | None,
        tensors: Iterator[tuple[str, np.ndarray]],
        of: str = "",
    ) -> None:
        """Write ``tensors`` of the model, or of the "critic", as a Hugging Face directory in their own dtype.

        They are read once, on rank 0.
        """
        from mindrlhf.weights.convert import export_hf  # once, after the last step

        placement = self._published_model(of)
        if of:  # one that is there was left by a run that was killed before it exported the actor
            remove(directory)
        export_hf(tensors, placement.network.hf_config, directory, dtype=placement.dtype, tokenizer_dir=tokenizer_dir)

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint of all ranks, in bytes."""
        reference = models.state_size_bytes(self.reference.placement) if self._saves_reference else 0
        return models.state_size_bytes(self.engine.placement, self.engine.state) + reference

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`SavesState.state_writer`: weights, optimiser state and the reference, if that changes."""
        writers = [models.state_writer(self.engine.placement, self.engine.name, hold, self.engine.state)]
        if self._saves_reference:
            writers.append(models.state_writer(self.reference.placement, REFERENCE_NAME, hold))
        return lambda directory: {name: value for write in writers for name, value in write(directory).items()}

    def restore(self, directory: str) -> None:
        self.engine.restore(directory)
        if self._saves_reference:
            models.restore(self.reference.placement, Path(directory) / REFERENCE_NAME)

    def sync_reference(self) -> None:
        self.reference.placement.copy_from(self.model.placement)

    def _computed(self, name: str, rows: PackedRows) -> dict[str, np.ndarray]:
        if name == "old_logprobs":
            return {name: self.engine.outputs(name, rows)}
        self.engine.count_compile(name, rows)
        # The reference model has other weights: what the policy's generator chose says nothing of its experts.
        rows = without_experts(rows)
        return {name: self.reference.logprobs(rows)}

    def _published_model(self, name: str) -> Placement:
        return self.model.placement

    def _open_broadcast(self, ranks: tuple[int, ...], root: int, num_words: int) -> "Broadcast":
        from mindrlhf.training import broadcast

        return broadcast.open_broadcast(ranks, root, num_words)
