"""Guards of a run's numbers, on the lead rank: skipped updates, drifting log-probabilities, gradient spikes."""

import dataclasses
import json
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import RunFailure
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.rollout.samples import Sample, verifier_names
from mindrlhf.training.batch import Batch
from mindrlhf.training.loop.policy import Policy, PolicyUpdate
from mindrlhf.training.loop.skipped_batches import SkippedBatch, save_skipped, saved_arrays

EVENTS_NAME, SKIPPED_NAME = "guards.jsonl", "skipped"
MAX_SAVED_BATCHES = 16  # enough to see what they share; a run that goes wrong for days must not fill the disk
_MEDIAN_WINDOW, _MEDIAN_MINIMUM = 64, 8  # updates
_SAMPLES_PER_REPORT = 3  # of each kind


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one step trained on, and what came of it."""

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


class Guards:
    """Looks at each step and says when the run must stop.

    Args:
        config: of the run; its section ``guard`` holds the limits.
        policy: keeps the batches of a step until the next one.
        first_step: see :class:`mindrlhf.observe.records.JsonlWriter`.
        state: what :meth:`state` returned at the checkpoint that the run goes on from.
    """

    def __init__(self, config: GrpoConfig, policy: Policy, *, first_step: int, state: Mapping[str, Any] | None = None):
        self._config = config
        self._limits = config.guard
        self._policy = policy
        self._output_dir = Path(config.run.output_dir)
        self._events = JsonlWriter(self._output_dir / EVENTS_NAME, first_step=first_step)
        state = state or {}
        self._num_skipped: int = state.get("num_skipped", 0)  # in a row
        self._norms = deque(state.get("norms", []), maxlen=_MEDIAN_WINDOW)
        self._failed_steps: dict[str, int] = dict(state.get("failed_steps", {}))  # in a row, by verifier
        self._has_warned = False
        self._failure = ""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values."""
        return {
            "num_skipped": self._num_skipped,
            "norms": list(self._norms),
            "failed_steps": dict(self._failed_steps),
        }

    def review(self, record: StepRecord, rollout_diff: float) -> dict[str, float]:
        """Look at a step, report what is strange, and return how often.

        Args:
            record: the step.
            rollout_diff: its ``rollout_diff/mean_abs``, in nats.
        """
        counts = {"guard/skipped_updates": 0, "guard/grad_spikes": 0}
        for number, update in enumerate(record.updates):
            norm = update.grad_norm
            if not math.isfinite(norm):
                is_first = counts["guard/skipped_updates"] == number  # no update of the step was made yet
                self._note_skipped(record, number, record.weights if is_first else "")
                counts["guard/skipped_updates"] += 1
                continue
            self._num_skipped = 0
            counts["guard/grad_spikes"] += self._note_spike(record, number, norm)
            self._norms.append(norm)
        self._compare_logprobs(record.step, rollout_diff)
        return counts

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look for verifiers that failed on every sample of a step: a run with such a one learns nothing from it.

        Args:
            step: from 1.
            samples: all that it drew, whether trained on or not.
        """
        asked = {name: [sample for sample in samples if name in sample.rewards] for name in verifier_names(samples)}
        failed = {
            name: (len(ones), ones[0].failures[name])
            for name, ones in asked.items()
            if all(name in sample.failures for sample in ones)
        }
        self._failed_steps = {name: self._failed_steps.get(name, 0) + 1 for name in failed}
        limit = self._limits.max_failed_steps
        for name, (count, reason) in failed.items():
            num_steps = self._failed_steps[name]
            said = f"step {step}: verifier {name} failed on all {count} samples ({reason})"
            if num_steps == 1:
                self._events.write({"step": step, "event": "failed_verifier", "verifier": name, "reason": reason})
                _warn(said)
            if limit and num_steps >= limit:
                self._failure = self._failure or (
                    f"{said}, {num_steps} steps in a row, and guard.max_failed_steps is {limit}: mend the verifier "
                    "('mindrlhf rewards lint' tries it), and resume from a checkpoint before"
                )

    def check(self) -> None:
        """Stop the run if the steps so far demand it; call it when their metrics are written.

        Raises:
            RunFailure: they do.
        """
        if self._failure:
            raise RunFailure(self._failure)

    def close(self) -> None:
        """Close the file of events."""
        self._events.close()

    def _note_skipped(self, record: StepRecord, number: int, weights: str) -> None:
        self._num_skipped += 1
        loss, norm = record.updates[number].loss, record.updates[number].grad_norm
        directory = self._save(record, number, weights)
        self._events.write(
            {
                "step": record.step,
                "event": "skipped_update",
                "update": number + 1,
                "loss": str(loss),
                "grad_norm": str(norm),
                "batch": str(directory or ""),
            }
        )
        advice = f"; look at it with 'mindrlhf replay {directory}'" if directory else ""
        _warn(
            f"step {record.step}, update {number + 1} is skipped: the loss is {loss}, the gradient norm {norm}{advice}"
        )
        if self._num_skipped >= self._limits.max_skipped_updates:
            self._failure = (
                f"{self._num_skipped} updates in a row had no finite loss and gradients, the last in step "
                f"{record.step}, and guard.max_skipped_updates is {self._limits.max_skipped_updates}: the weights are "
                f"those of the last good update; lower optimizer.start_lr or optimizer.max_grad_norm{advice}"
            )

    def _save(self, record: StepRecord, number: int, weights: str) -> Path | None:
        """Save the batch of a skipped update; None when enough are saved, or the disk refuses."""
        parent = self._output_dir / SKIPPED_NAME
        directory = parent / f"step_{record.step:08d}" / f"update_{number + 1}"
        if not directory.exists() and len(list(parent.glob("step_*/update_*"))) >= MAX_SAVED_BATCHES:
            return None
        position = number % len(record.batches)
        batch, update = record.batches[position], record.updates[number]
        skipped = SkippedBatch(
            step=record.step,
            update=number + 1,
            num_micro_batches=len(batch.micro_batches),
            num_tokens=batch.num_tokens,
            kl_coefficient=record.kl_coefficient,
            loss=str(update.loss),
            grad_norm=str(update.grad_norm),
            weights=weights,
            placed=[list(place) for place in batch.placed],
            samples=[_describe(sample) for sample in record.samples_of(position)],
            config=json.loads(json.dumps(dataclasses.asdict(self._config))),
        )
        try:
            save_skipped(directory, skipped, saved_arrays(self._policy.held_rows(position), update.logprobs))
        except OSError as error:
            _warn(f"the batch of step {record.step} cannot be saved in {directory}: {error.strerror or error}")
            return None
        return directory

    def _note_spike(self, record: StepRecord, number: int, norm: float) -> bool:
        factor = self._limits.grad_spike_factor
        if not factor or len(self._norms) < _MEDIAN_MINIMUM:
            return False
        median = float(np.median(self._norms))
        if norm <= factor * median:
            return False
        position = number % len(record.batches)
        batch = record.batches[position]
        given = [rows.tokens["advantages"] for rows in self._policy.held_rows(position)]
        advantages = np.array([np.abs(values).max() for values in batch.responses(given)])
        logprobs = np.array([values.min() for values in batch.responses(record.updates[number].logprobs)])
        samples = record.samples_of(position)
        self._events.write(
            {
                "step": record.step,
                "event": "grad_spike",
                "update": number + 1,
                "grad_norm": norm,
                "median": median,
                "samples": [
                    {
                        "chosen_for": reason,
                        **_describe(samples[index]),
                        "max_abs_advantage": float(advantages[index]),
                        "min_logprob": float(logprobs[index]),
                    }
                    for reason, order in (("advantage", -advantages), ("logprob", logprobs))
                    for index in np.argsort(order, kind="stable")[:_SAMPLES_PER_REPORT]
                ],
            }
        )
        _warn(
            f"step {record.step}, update {number + 1}: the gradient norm is {norm:.3g}, {norm / median:.3g} times its "
            f"running median; its samples are in {self._output_dir / EVENTS_NAME}"
        )
        return True

    def _compare_logprobs(self, step: int, difference: float) -> None:
        limits = self._limits
        said = f"step {step}: the log-probabilities of rollout and training differ by {difference:.3g} nats a token"
        # One that is not finite has been counted as a skipped update, unless the generator's are at fault.
        if 0 < limits.max_rollout_diff < difference:
            self._failure = self._failure or (
                f"{said}, and guard.max_rollout_diff is {limits.max_rollout_diff:g}: the samples are not those of the "
                "trained weights; look where rollout_diff began to grow in metrics.jsonl, set rollout.top_p=1 and "
                "rollout.top_k=0, and resume from a checkpoint before, or raise the limit"
            )
        is_far = bool(limits.warn_rollout_diff) and not difference <= limits.warn_rollout_diff
        if is_far and not self._has_warned:
            self._events.write({"step": step, "event": "rollout_diff", "mean_abs": difference})
            _warn(f"{said}, and guard.warn_rollout_diff is {limits.warn_rollout_diff:g}")
        self._has_warned = is_far


def _describe(sample: Sample) -> dict[str, Any]:
    return {"prompt": sample.prompt, "completion": sample.completion, "reward": sample.reward}


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
