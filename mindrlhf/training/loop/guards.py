"""The guards of a run's numbers, on rank 0: they look at each step and say when the run must stop."""

import dataclasses
import itertools
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.algorithm_state import GuardsState
from mindrlhf.config.observe import GuardSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import RunFailure
from mindrlhf.evaluation.heldout import Evaluation
from mindrlhf.observe.fingerprint import FingerprintWriter
from mindrlhf.observe.records import GUARDS_NAME, JsonlWriter
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.rollout.samples import Sample, verifier_names
from mindrlhf.training.loop.dump import StepDump
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.skipped_batches import SkippedBatch, save_skipped, saved_arrays
from mindrlhf.training.loop.step import Step


class Guard:
    """Looks at each step for one thing that goes wrong. Each overrides what it needs to see.

    Attributes:
        METRIC: name of the count of updates that it found, "" when it counts none.
        failure: why the run must stop, "" while it may go on.
    """

    METRIC = ""
    failure = ""

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look at all samples that a step, from 1, generated, whether trained on or not."""

    def review_update(self, step: Step, number: int) -> bool:
        """Look at update ``number``, from 0, of a step and return whether something is wrong with it."""
        return False

    def review_logprobs(self, step: int, rollout_diff: float) -> None:
        """Look at ``rollout_diff/mean_abs`` of a step, from 1, in nats."""

    def review_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Look at all evaluations of the run, when a new one is among them."""

    def close(self) -> None:
        """Say what remains to be said when the run ends, however it does."""


class Events:
    """``guards.jsonl``, and a warning on the console for each event; see ``JsonlWriter`` for ``first_step``."""

    def __init__(self, output_dir: Path, *, first_step: int):
        self.path = output_dir / GUARDS_NAME
        self._writer = JsonlWriter(self.path, first_step=first_step)

    def write(self, step: int, event: str, warning: str, **values: Any) -> None:
        """Write an event of a step and warn of it, unless the warning is empty."""
        self._writer.write({"step": step, "event": event, **values})
        if warning:
            warn(warning)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def describe(sample: Sample) -> dict[str, Any]:
    """Return what identifies a sample, as JSON values."""
    return {"prompt": sample.prompt_text, "completion": sample.response_text, "reward": sample.reward.total}


def warn(text: str) -> None:
    """Print a line of warning."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


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
            samples=[
                describe(sample)
                for sample, count in zip(step.samples_of(position), batch.counts or itertools.repeat(1))
                for _ in range(count)
            ],
            config=json.loads(json.dumps(dataclasses.asdict(self._config))),
        )
        try:
            arrays = saved_arrays(self._policy.held_rows(position, batch), update.logprobs, batch.images)
            save_skipped(directory, skipped, arrays)
        except OSError as error:
            warn(f"the batch of step {step.number} cannot be saved in {directory}: {error.strerror or error}")
            return None
        return directory


_MEDIAN_WINDOW, _MEDIAN_MINIMUM = 64, 8  # updates
_SAMPLES_PER_REPORT = 3  # of each kind


class GradientSpikes(Guard):
    """Reports the samples of an update whose norm is ``guard.grad_spike_factor`` times the median; stops no run.

    Attributes:
        norms: of the last updates that were made.
    """

    METRIC = "guard/grad_spikes"

    def __init__(self, limits: GuardSection, policy: Policy, events: Events, norms: Sequence[float]):
        self.norms = deque(norms, maxlen=_MEDIAN_WINDOW)
        self._factor = limits.grad_spike_factor
        self._policy = policy
        self._events = events

    def review_update(self, step: Step, number: int) -> bool:
        """Report the update if its norm is a spike."""
        norm = step.updates[number].grad_norm
        # Where all samples are filtered out, or earned the same, there is no gradient and nothing to compare with.
        if not math.isfinite(norm) or norm == 0:
            return False
        median = float(np.median(self.norms)) if len(self.norms) >= _MEDIAN_MINIMUM else math.inf
        is_spike = bool(self._factor) and norm > self._factor * median
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


class FailedVerifiers(Guard):
    """Reports a verifier at the first such step; ``guard.max_failed_steps`` of them in a row stop the run.

    Attributes:
        num_steps: such steps in a row, by verifier.
    """

    def __init__(self, limits: GuardSection, events: Events, num_steps: Mapping[str, int]):
        self.num_steps = dict(num_steps)
        self._limit = limits.max_failed_steps
        self._events = events

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look for verifiers that failed on all samples they were asked for."""
        rewards = [sample.reward for sample in samples]
        asked = {name: [one for one in rewards if name in one.parts] for name in verifier_names(samples)}
        failed = {
            name: (len(ones), ones[0].failures[name])
            for name, ones in asked.items()
            if all(name in one.failures for one in ones)
        }
        self.num_steps = {name: self.num_steps.get(name, 0) + 1 for name in failed}
        for name, (count, reason) in failed.items():
            num_steps = self.num_steps[name]
            said = f"step {step}: verifier {name} failed on all {count} samples ({reason})"
            if num_steps == 1:
                self._events.write(step, "failed_verifier", said, verifier=name, reason=reason)
            if self._limit and num_steps >= self._limit:
                self.failure = self.failure or (
                    f"{said}, {num_steps} steps in a row, and guard.max_failed_steps is {self._limit}: mend the "
                    "verifier ('mindrlhf rewards check' tries it), and resume from a checkpoint before"
                )


class RolloutDrift(Guard):
    """Warns when the distance passes ``guard.warn_rollout_diff``, and stops the run at ``guard.max_rollout_diff``."""

    def __init__(self, limits: GuardSection, events: Events):
        self._limits = limits
        self._events = events
        self._has_warned = False

    def review_logprobs(self, step: int, rollout_diff: float) -> None:
        """Compare the distance with the limits."""
        limits = self._limits
        said = f"step {step}: the log-probabilities of rollout and training differ by {rollout_diff:.3g} nats a token"
        # One that is not finite has been counted as a skipped update, unless the generator's are at fault.
        if 0 < limits.max_rollout_diff < rollout_diff:
            self.failure = (
                f"{said}, and guard.max_rollout_diff is {limits.max_rollout_diff:g}: the samples are not those of the "
                "trained weights; look where rollout_diff began to grow in metrics.jsonl, set rollout.top_p=1 and "
                "rollout.top_k=0, and resume from a checkpoint before, or raise the limit"
            )
        is_far = bool(limits.warn_rollout_diff) and not rollout_diff <= limits.warn_rollout_diff
        if is_far and not self._has_warned:
            warning = f"{said}, and guard.warn_rollout_diff is {limits.warn_rollout_diff:g}"
            self._events.write(step, "rollout_diff", warning, mean_abs=rollout_diff)
        self._has_warned = is_far


@dataclass(frozen=True)
class Observers:
    """Who looks at a step when it is done: guards, and files with its samples and fingerprints.

    Attributes:
        dump: dumps chosen steps; None when there are none.
    """

    guards: "Guards"
    samples: SampleWriter
    fingerprint: FingerprintWriter
    dump: StepDump | None = None


class Guards:
    """All guards, in the order in which they look at an update and in which their failures count.

    Args:
        config: of the run; its section ``guard`` holds the limits.
        policy: keeps the batches of a step until the next one.
        first_step: see :class:`mindrlhf.observe.records.JsonlWriter`.
        state: what :meth:`state` returned at the checkpoint that the run goes on from.
        more: further guards, each made of the file that they write to.
    """

    def __init__(
        self,
        config: GrpoConfig,
        policy: Policy,
        *,
        first_step: int,
        state: GuardsState | None = None,
        more: Sequence[Callable[[Events], Guard]] = (),
    ):
        state = state or GuardsState()
        self._events = Events(Path(config.run.output_dir), first_step=first_step)
        self._skipped = SkippedUpdates(config, policy, self._events, state.num_skipped)
        self._spikes = GradientSpikes(config.guard, policy, self._events, state.norms)
        self._verifiers = FailedVerifiers(config.guard, self._events, state.failed_steps)
        drift = RolloutDrift(config.guard, self._events)
        self._guards = (self._skipped, self._spikes, self._verifiers, drift, *(make(self._events) for make in more))

    def state(self) -> GuardsState:
        """Return what a resumed run needs."""
        return GuardsState(self._skipped.num_in_a_row, list(self._spikes.norms), dict(self._verifiers.num_steps))

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look at all samples that a step, from 1, generated, whether trained on or not; call it before ``review``."""
        for guard in self._guards:
            guard.review_rewards(step, samples)

    def review(self, step: Step, rollout_diff: float | None) -> dict[str, float]:
        """Look at a step, report what is strange, and return how often.

        Args:
            step: when its updates are done.
            rollout_diff: its ``rollout_diff/mean_abs``, in nats; None where all samples are of older weights.
        """
        counts = {guard.METRIC: 0 for guard in self._guards if guard.METRIC}
        for number in range(len(step.updates)):
            for guard in self._guards:
                if guard.review_update(step, number):
                    counts[guard.METRIC] += 1
        if rollout_diff is not None:
            for guard in self._guards:
                guard.review_logprobs(step.number, rollout_diff)
        return counts

    def review_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for guard in self._guards:
            guard.review_evaluations(evaluations)

    def check(self) -> None:
        """Stop the run if the steps so far demand it; call it when their metrics are written.

        Raises:
            RunFailure: they do.
        """
        for guard in self._guards:
            if guard.failure:
                raise RunFailure(guard.failure)

    def close(self) -> None:
        """Have the guards say what remains to be said, and close the file of events."""
        for guard in self._guards:
            guard.close()
        self._events.close()
