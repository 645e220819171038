"""The worker of a rank in training on fixed data: fine-tuning, preference learning, reward models."""

from dataclasses import replace

import numpy as np

from mindrlhf.training.batch import Batch
from mindrlhf.training.engine.actor import Actor
from mindrlhf.training.engine.cells import check_finite
from mindrlhf.training.engine.model import Model
from mindrlhf.training.results import HeldOutLogProbs, UpdateResult


class OfflineWorker(Actor):
    """An engine, and a reference model where the run has one in memory, on one rank.

    Its public methods are called through the team; those that publish export a model that is sharded.
    """

    def train(self, batch: Batch, lr: float) -> UpdateResult:
        """Make one optimiser update; the statistics are those of the loss."""
        _show(self.model, batch)
        # The host divides the coefficients of pairs itself.
        num_tokens = 1 if self.engine.inputs else batch.num_tokens
        done = self.engine.update(replace(batch, num_tokens=num_tokens), lr)
        return replace(done, grad_norm=check_finite(done.grad_norm), logprobs=())

    def evaluate(self, batch: Batch) -> HeldOutLogProbs:
        """Return the summed log-probability of the response tokens of this rank's share."""
        return HeldOutLogProbs(sum(float(outputs.sum()) for outputs in self.measure(batch, "policy")))

    def measure(self, batch: Batch, name: str) -> list[np.ndarray]:
        """Return the outputs, float32 [rows, length], of the "policy" or the "reference" for each micro-batch."""
        model = self.model if name == "policy" else self.reference
        _show(model, batch)
        return [model.logprobs(rows) for rows in batch.micro_batches]

    def drop_reference(self) -> None:
        """Free the reference model."""
        self.reference = None


def _show(model: Model, batch: Batch) -> None:
    if batch.images:
        model.see(tuple(batch.images.values()))
