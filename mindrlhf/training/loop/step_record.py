"""What one step trained on, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.rollout.samples import Sample
from mindrlhf.training.batch import Batch
from mindrlhf.training.loop.policy import PolicyUpdate


@dataclass(frozen=True)
class StepRecord:
    """One step, as the guards and the key data look at it."""

    step: int  # from 1
    samples: Sequence[Sample]
    batches: Sequence[Batch]  # the samples in order, one for each update of a pass
    updates: Sequence[PolicyUpdate]  # passes in order
    kl_coefficient: float
    weights: str  # digest of the weights that the step began with

    def samples_of(self, position: int) -> Sequence[Sample]:
        """Return the samples of batch number ``position``."""
        start = sum(len(batch.placed) for batch in self.batches[:position])
        return self.samples[start : start + len(self.batches[position].placed)]
