"""The guard of updates that were skipped because their loss or gradients are not finite."""

import dataclasses
import json
import math
from pathlib import Path

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.training.loop.guards.guard import Events, Guard, describe, warn
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.skipped_batches import SkippedBatch, save_skipped, saved_arrays
from mindrlhf.training.loop.step import Step

SKIPPED_NAME = "skipped"
MAX_SAVED_BATCHES = 16  # enough to see what they share; a run that goes wrong for days must not fill the disk


class SkippedUpdates(Guard):
    """Saves the batch of each skipped update; ``guard.max_skipped_updates`` of them in a row stop the run.

    Attributes:
        num_in_a_row: skipped updates since the last that was made.
    """

    METRIC = "guard/skipped_updates"

    def __init__(self, config: GrpoConfig, policy: Policy, events: Events, num_in_a_row: int):
        self.num_in_a_row = num_in_a_row
        self._config = config
        self._policy = policy
        self._events = events
        self._directory = Path(config.run.output_dir) / SKIPPED_NAME

    def review_update(self, step: Step, number: int) -> bool:
        """Report the update if it was skipped."""
        loss, norm = step.updates[number].loss, step.updates[number].grad_norm
        if math.isfinite(norm):
            self.num_in_a_row = 0
            return False
        self.num_in_a_row += 1
        directory = self._save(step, number)
        advice = f"; look at it with 'mindrlhf replay {directory}'" if directory else ""
        self._events.write(
            step.number,
            "skipped_update",
            f"step {step.number}, update {number + 1} is skipped: the loss is {loss}, the gradient norm {norm}{advice}",
            update=number + 1,
            loss=str(loss),
            grad_norm=str(norm),
            batch=str(directory or ""),
        )
        limit = self._config.guard.max_skipped_updates
        if self.num_in_a_row >= limit:
            self.failure = (
                f"{self.num_in_a_row} updates in a row had no finite loss and gradients, the last in step "
                f"{step.number}, and guard.max_skipped_updates is {limit}: the weights are "
                f"those of the last good update; lower optimizer.start_lr or optimizer.max_grad_norm{advice}"
            )
        return True

    def _save(self, step: Step, number: int) -> Path | None:
        """Save the batch of a skipped update; None when enough are saved, or the disk refuses."""
        directory = self._directory / f"step_{step.number:08d}" / f"update_{number + 1}"
        if not directory.exists() and len(list(self._directory.glob("step_*/update_*"))) >= MAX_SAVED_BATCHES:
            return None
        position = number % len(step.batches)
        batch, update = step.batches[position], step.updates[number]
        was_any_made = any(math.isfinite(earlier.grad_norm) for earlier in step.updates[:number])
        skipped = SkippedBatch(
            step=step.number,
            update=number + 1,
            num_micro_batches=len(batch.micro_batches),
            num_tokens=batch.num_tokens,
            kl_coefficient=step.kl_coefficient,
            loss=str(update.loss),
            grad_norm=str(update.grad_norm),
            weights="" if was_any_made else step.weights,
            placed=[list(place) for place in batch.placed],
            samples=[describe(sample) for sample in step.samples_of(position)],
            config=json.loads(json.dumps(dataclasses.asdict(self._config))),
        )
        try:
            arrays = saved_arrays(self._policy.held_rows(position, batch), update.logprobs, batch.images)
            save_skipped(directory, skipped, arrays)
        except OSError as error:
            warn(f"the batch of step {step.number} cannot be saved in {directory}: {error.strerror or error}")
            return None
        return directory
