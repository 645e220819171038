"""The guards of a run's numbers, on rank 0: they look at each step, warn, and stop the run."""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.algorithm_state import GuardsState, LearningState
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.packing import PackedRows
from mindrlhf.errors import RunFailure
from mindrlhf.evaluation.heldout import Evaluation
from mindrlhf.observe.fingerprint import FingerprintWriter
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.rollout.samples import Sample, verifier_names
from mindrlhf.training.loop.alarms import Condition, Events, LearningAlarm, warn
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.step import Step, StepSamples


def describe(sample: Sample) -> dict[str, Any]:
    """Return what identifies a sample, as JSON values."""
    return {"prompt": sample.prompt_text, "completion": sample.response_text, "reward": sample.reward.total}


MAX_FAILED_STEPS = 5  # in a row in which a verifier failed on every sample
SKIPPED_NAME = "skipped"
MAX_SKIPPED_UPDATES = 3  # in a row
MAX_SAVED_BATCHES = 16  # enough to see what they share; a run that goes wrong for days must not fill the disk


class SkippedUpdates:
    """Saves the batch of each skipped update; ``MAX_SKIPPED_UPDATES`` of them in a row stop the run.

    Attributes:
        num_in_a_row: skipped updates since the last that was made.
        failure: why the run must stop, "" while it may go on.
    """

    METRIC = "guard/skipped_updates"

    def __init__(self, config: GrpoConfig, policy: Policy, events: Events, num_in_a_row: int):
        self.num_in_a_row = num_in_a_row
        self.failure = ""
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
        path = self._save(step, number)
        advice = f"; its batch is in {path}" if path else ""
        self._events.write(
            step.number,
            "skipped_update",
            f"step {step.number}, update {number + 1} is skipped: the loss is {loss}, the gradient norm {norm}{advice}",
            update=number + 1,
            loss=str(loss),
            grad_norm=str(norm),
            batch=str(path or ""),
        )
        if self.num_in_a_row >= MAX_SKIPPED_UPDATES:
            self.failure = (
                f"{self.num_in_a_row} updates in a row had no finite loss and gradients, the last in step "
                f"{step.number}: the weights are those of the last good update; lower optimizer.start_lr or "
                f"optimizer.max_grad_norm{advice}"
            )
        return True

    def _save(self, step: Step, number: int) -> Path | None:
        """Save the batch of a skipped update; None when enough are saved, or the disk refuses."""
        path = self._directory / f"step_{step.number:08d}_update_{number + 1}.npz"
        if not path.exists() and len(list(self._directory.glob("*.npz"))) >= MAX_SAVED_BATCHES:
            return None
        position = number % len(step.batches)
        batch, update = step.batches[position], step.updates[number]
        arrays = _row_arrays(self._policy.held_rows(position, batch), update.logprobs, batch.images)
        arrays |= {"placed": np.array(batch.placed), "num_tokens": np.array(batch.num_tokens)}
        samples = step.samples_of(position)
        arrays |= {"prompts": np.array([sample.prompt_text for sample in samples])}
        arrays |= {"completions": np.array([sample.response_text for sample in samples])}
        arrays |= {"rewards": np.array([sample.reward.total for sample in samples])}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            np.savez(path, **arrays)
        except OSError as error:
            warn(f"the batch of step {step.number} cannot be saved in {path}: {error.strerror or error}")
            return None
        return path


def _row_arrays(
    micro_batches: Sequence[PackedRows], logprobs: Sequence[np.ndarray], images: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the rows of a batch, the log-probabilities that the update computed, and images, as `MICRO_BATCH.NAME`."""
    arrays = {}
    for index, (rows, computed) in enumerate(zip(micro_batches, logprobs, strict=True)):
        named = {name: getattr(rows, name) for name in ("input_ids", "segment_ids", "labels", "mask")}
        named |= {**rows.tokens, **rows.context, "logprobs": computed}
        named |= {f"image_{number}": images[digest] for number, digest in enumerate(rows.images)}
        arrays |= {f"{index}.{name}": array for name, array in named.items()}
    return arrays


_MEDIAN_WINDOW, _MEDIAN_MINIMUM = 64, 8  # updates
SPIKE_FACTOR = 5.0  # times the median of the gradient norms
WARNING_SHARE = 0.1  # of guard.max_rollout_diff
_SAMPLES_PER_REPORT = 3  # of each kind


class GradientSpikes:
    """Reports the samples of an update whose norm is ``SPIKE_FACTOR`` times the median; stops no run.

    Attributes:
        norms: of the last updates that were made.
    """

    METRIC = "guard/grad_spikes"

    def __init__(self, policy: Policy, events: Events, norms: Sequence[float]):
        self.norms = deque(norms, maxlen=_MEDIAN_WINDOW)
        self._policy = policy
        self._events = events

    def review_update(self, step: Step, number: int) -> bool:
        """Report the update if its norm is a spike."""
        norm = step.updates[number].grad_norm
        # Where all samples are filtered out, or earned the same, there is no gradient and nothing to compare with.
        if not math.isfinite(norm) or norm == 0:
            return False
        median = float(np.median(self.norms)) if len(self.norms) >= _MEDIAN_MINIMUM else math.inf
        is_spike = norm > SPIKE_FACTOR * median
        if is_spike:
            self._report(step, number, norm, median)
        self.norms.append(norm)
        return is_spike

    def _report(self, step: Step, number: int, norm: float, median: float) -> None:
        self._events.write(
            step.number,
            "grad_spike",
            f"step {step.number}, update {number + 1}: the gradient norm is {norm:.3g}, {norm / median:.3g} times its "
            f"running median; its samples are in {self._events.path}",
            update=number + 1,
            grad_norm=norm,
            median=median,
            samples=self._suspects(step, number),
        )

    def _suspects(self, step: Step, number: int) -> list[dict[str, Any]]:
        """Return the samples of an update with the largest advantages and those with the least likely tokens."""
        position = number % len(step.batches)
        batch, samples = step.batches[position], step.samples_of(position)
        given = [rows.tokens["advantages"] for rows in self._policy.held_rows(position, batch)]
        advantages = np.array([np.abs(values).max() for values in batch.responses(given)])
        logprobs = np.array([values.min() for values in batch.responses(step.updates[number].logprobs)])
        return [
            {
                "chosen_for": reason,
                **describe(samples[index]),
                "max_abs_advantage": float(advantages[index]),
                "min_logprob": float(logprobs[index]),
            }
            for reason, order in (("advantage", -advantages), ("logprob", logprobs))
            for index in np.argsort(order, kind="stable")[:_SAMPLES_PER_REPORT]
        ]


@dataclass(frozen=True)
class Observers:
    """Post-step observers: guards, sample writer, fingerprint writer."""

    guards: "Guards"
    samples: SampleWriter
    fingerprint: FingerprintWriter


class Guards:
    """The guards of a run: skipped updates, gradient spikes, alarms.

    Args:
        config: of the run; its section ``guard`` holds the limits.
        policy: keeps the batches of a step until the next one.
        first_step: see :class:`mindrlhf.observe.records.JsonlWriter`.
        state: what :meth:`state` returned at the checkpoint that the run goes on from.
        learning: state of the alarms, which change it in place.
        num_steps: of the run; 0 when unknown.
    """

    def __init__(
        self,
        config: GrpoConfig,
        policy: Policy,
        *,
        first_step: int,
        state: GuardsState | None = None,
        learning: LearningState | None = None,
        num_steps: int = 0,
    ):
        state = state or GuardsState()
        self._limits = config.guard
        self._events = Events(Path(config.run.output_dir), first_step=first_step)
        self._skipped = SkippedUpdates(config, policy, self._events, state.num_skipped)
        self._spikes = GradientSpikes(policy, self._events, state.norms)
        self._alarms = LearningAlarm(config, self._events, learning or LearningState(), num_steps)

    def state(self) -> GuardsState:
        """Return what a resumed run needs beside the state of the alarms."""
        return GuardsState(self._skipped.num_in_a_row, list(self._spikes.norms))

    def check_scored(self, step: int, samples: StepSamples) -> None:
        """Say which samples of a step, from 1, are left out as nothing could score them.

        Raises:
            RunFailure: they are more than ``guard.max_unscored``, or leave nothing to train on.
        """
        unscored = [sample.reward.unscored for sample in samples.generated if not sample.is_scored]
        if not unscored:
            return
        (reason, _), limit = Counter(unscored).most_common(1)[0], self._limits.max_unscored
        said = f"{len(unscored)} of {len(samples.generated)} samples of step {step} could not be scored ({reason})"
        if len(unscored) > limit * len(samples.generated) or not samples.scored().used:
            rest = f"guard.max_unscored is {limit:g}" if samples.scored().used else "no group has two left"
            raise RunFailure(f"{said}, and {rest}: fix what they wait for, and resume from the last checkpoint")
        warn(f"{said} and are left out")

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look at all samples that a step, from 1, generated, whether trained on or not; call it before ``review``."""
        for name in verifier_names(samples):
            self._alarms.watch(step, self._failed_verifier(name, samples))
        self._alarms.review_rewards(step, samples)

    def review(self, step: Step, rollout_diff: float | None) -> dict[str, float]:
        """Look at a step, report what is strange, and return how often.

        Args:
            step: when its updates are done.
            rollout_diff: its ``rollout_diff/mean_abs``, in nats; None where all samples are of older weights.
        """
        counts = {
            guard.METRIC: sum(guard.review_update(step, number) for number in range(len(step.updates)))
            for guard in (self._skipped, self._spikes)
        }
        if step.updates:
            self._alarms.review_losses(step.number, [(update.loss, update.grad_norm) for update in step.updates])
        if rollout_diff is not None:
            for condition in self._drift(rollout_diff):
                self._alarms.watch(step.number, condition)
        return counts

    def review_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Look at all evaluations of the run, when a new one is among them."""
        self._alarms.review_evaluations(evaluations)

    def _failed_verifier(self, name: str, samples: Sequence[Sample]) -> Condition:
        failures = [sample.reward.failures.get(name) for sample in samples if name in sample.reward.parts]

        def text(num_steps: int) -> str:
            said = f"verifier {name} failed on all {len(failures)} samples ({failures[0]})"
            return f"{said}, {num_steps} steps in a row" if num_steps > 1 else said

        remedy = ": fix the verifier ('mindrlhf rewards check' tries it), and resume from a checkpoint before"
        return Condition(f"failed {name}", None not in failures, text, 1, stop_after=MAX_FAILED_STEPS, remedy=remedy)

    def _drift(self, rollout_diff: float) -> Iterator[Condition]:
        stop_above = self._limits.max_rollout_diff
        said = f"the log-probabilities of rollout and training differ by {rollout_diff:.3g} nats a token"
        # NaN is far; it does not stop: it has been counted as a skipped update, unless the generator's are at fault.
        is_far = stop_above > 0 and not rollout_diff <= WARNING_SHARE * stop_above
        text = f"{said}; the run stops above guard.max_rollout_diff = {stop_above:g}"
        yield Condition("rollout_diff", is_far, lambda _: text, 1)
        remedy = (
            ": the samples are not those of the trained weights; look where rollout_diff began to grow in "
            "metrics.jsonl, set rollout.top_p=1 and rollout.top_k=0, and resume from a checkpoint before, or raise the "
            "limit"
        )
        is_over, limit = 0 < stop_above < rollout_diff, f"{said}, and guard.max_rollout_diff is {stop_above:g}"
        yield Condition("max_rollout_diff", is_over, lambda _: limit, 1, stop_after=1, remedy=remedy)

    def check(self) -> None:
        """Stop the run if the steps so far demand it; call it when their metrics are written.

        Raises:
            RunFailure: they do.
        """
        if failure := self._skipped.failure or self._alarms.failure:
            raise RunFailure(failure)

    def close(self) -> None:
        """Repeat the alarms that still hold, and close the file of events."""
        self._alarms.close()
        self._events.close()
