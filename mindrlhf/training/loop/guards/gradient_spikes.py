"""The guard of gradient norms that exceed their running median many times."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindrlhf.config.observe import GuardSection
from mindrlhf.training.loop.guards.guard import Events, Guard, describe
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.step_record import StepRecord

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

    def review_update(self, record: StepRecord, number: int) -> bool:
        """Report the update if its norm is a spike."""
        norm = record.updates[number].grad_norm
        # Where all samples are filtered out, or earned the same, there is no gradient and nothing to compare with.
        if not math.isfinite(norm) or norm == 0:
            return False
        median = float(np.median(self.norms)) if len(self.norms) >= _MEDIAN_MINIMUM else math.inf
        is_spike = bool(self._factor) and norm > self._factor * median
        if is_spike:
            self._report(record, number, norm, median)
        self.norms.append(norm)
        return is_spike

    def _report(self, record: StepRecord, number: int, norm: float, median: float) -> None:
        self._events.write(
            record.step,
            "grad_spike",
            f"step {record.step}, update {number + 1}: the gradient norm is {norm:.3g}, {norm / median:.3g} times its "
            f"running median; its samples are in {self._events.path}",
            update=number + 1,
            grad_norm=norm,
            median=median,
            samples=self._suspects(record, number),
        )

    def _suspects(self, record: StepRecord, number: int) -> list[dict[str, Any]]:
        """Return the samples of an update with the largest advantages and those with the least likely tokens."""
        position = number % len(record.batches)
        batch, samples = record.batches[position], record.samples_of(position)
        given = [rows.tokens["advantages"] for rows in self._policy.held_rows(position, batch)]
        advantages = np.array([np.abs(values).max() for values in batch.responses(given)])
        logprobs = np.array([values.min() for values in batch.responses(record.updates[number].logprobs)])
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
