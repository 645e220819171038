"""Samples that steps leave over, as a checkpoint has them, and the account of all samples of a run."""

import dataclasses
from collections.abc import Callable

import numpy as np

from mindrlhf.algorithms.overlong import complete
from mindrlhf.checkpoint.algorithm_state import SampleTotals
from mindrlhf.rollout.samples import Sample
from mindrlhf.training.loop.step import StepSamples


class SampleLedger:
    """Accounts for every sample of a run: what was generated has been used, is left over, or was dropped.

    Args:
        state: what :meth:`state` returned at the checkpoint that the run goes on from.
    """

    def __init__(self, state: SampleTotals | None = None):
        self._totals = state or SampleTotals()

    def state(self) -> SampleTotals:
        """Return the totals so far, and how many samples are left over."""
        return self._totals

    def add(self, step: StepSamples) -> dict[str, float]:
        """Enter a step and return its metrics.

        Raises:
            AssertionError: the sums of the step or of the run do not add up.
        """
        generated, used, dropped, leftover = map(len, (step.generated, step.used, step.dropped, step.leftover))
        before = self._totals.carried
        # Groups of partial rollout that go on are not generated yet.
        assert before in (0, step.num_stale), f"{before} samples were carried over, {step.num_stale} are used"
        assert before + generated == used + leftover + dropped, (
            f"{before} samples carried over before and {generated} generated are not {used} used, {leftover} carried "
            f"over and {dropped} dropped"
        )
        last = self._totals
        self._totals = totals = SampleTotals(
            last.generated + generated, last.used + used, last.dropped + dropped, leftover
        )
        assert totals.generated == totals.used + totals.carried + totals.dropped, (
            f"the samples of the run do not add up: {totals}"
        )
        return {
            "samples/generated": float(generated),
            "samples/used": float(used),
            "samples/used_stale": float(step.num_stale),
            "samples/used_without_signal": float(step.num_without_signal),
            "samples/used_cut": float(np.sum(~complete([sample.completion.finish_reason for sample in step.used]))),
            "samples/carried": float(leftover),
            "samples/dropped_without_signal": float(dropped),
            "samples/total_generated": float(totals.generated),
            "samples/total_used": float(totals.used),
            "samples/total_dropped_without_signal": float(totals.dropped),
        }


def without_images(record: Sample | StepSamples) -> Sample | StepSamples:
    """Return samples as a checkpoint has them: of images the files of the prompts alone."""
    return _changed(record, lambda sample: dataclasses.replace(sample, images=()))


def with_images(record: Sample | StepSamples) -> Sample | StepSamples:
    """Undo ``without_images``."""
    return _changed(record, lambda sample: dataclasses.replace(sample, images=sample.prompt.images))


def _changed(record: Sample | StepSamples, change: Callable[[Sample], Sample]) -> Sample | StepSamples:
    if isinstance(record, Sample):
        return change(record)
    lists = {name: list(map(change, getattr(record, name))) for name in ("generated", "used", "leftover", "dropped")}
    return dataclasses.replace(record, **lists, greedy=list(map(change, record.greedy)))
