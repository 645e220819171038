"""What steps leave over: samples for the next step, as a checkpoint keeps them, and an account of every sample."""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from mindrlhf.algorithms.overlong import complete
from mindrlhf.checkpoint.algorithm_state import OffPolicyState, SampleTotals
from mindrlhf.checkpoint.leftover import LeftoverSample, pack, unpack
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.data.mindrecord import Prompt, no_ids
from mindrlhf.images.pixels import encode_png
from mindrlhf.rewards.types import RewardResult
from mindrlhf.rollout.samples import Sample
from mindrlhf.rollout.types import Completion
from mindrlhf.training.loop.step import StepSamples

# In checkpoints of earlier releases: with a number, the name of an image; and what not all of them say of a completion.
_IMAGE = "image"
_FLAT_OPTIONS = ("is_generated", "num_turns", "num_tool_calls", "num_tool_failures", "num_neutralised_answers")
_FLAT_OPTIONS += ("spans", "experts")


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


def to_leftover(samples: Sequence[Sample]) -> list[LeftoverSample]:
    """Return samples as a checkpoint keeps them; of images the files."""
    return [pack(dataclasses.replace(sample, images=())) for sample in samples]


def from_leftover(leftover: Sequence[LeftoverSample]) -> list[Sample]:
    """Return what ``to_leftover`` was called on.

    Raises:
        DamagedDirectory: the samples of the checkpoint lack a value, or have one too many.
    """
    samples = []
    for index, item in enumerate(leftover):
        try:
            sample = _flat_sample(item) if isinstance(item.record.get("prompt"), str) else unpack(Sample, item)
        except KeyError as error:
            raise DamagedDirectory(
                f"the checkpoint is damaged: {error} of carried-over sample {index} is missing or new"
            ) from error
        samples.append(dataclasses.replace(sample, images=sample.prompt.images))
    return samples


def _flat_sample(item: LeftoverSample) -> Sample:
    """Return a sample as earlier releases kept it: the values of all its records side by side."""
    values = {**item.record, **item.arrays}
    numbers = sorted(int(name.removeprefix(_IMAGE)) for name in values if re.fullmatch(rf"{_IMAGE}\d+", name))
    sample = Sample(
        group=values.pop("group"),
        prompt=Prompt(
            prompt_ids=values.pop("prompt_ids"),
            response_ids=no_ids(),
            answer=values.pop("answer"),
            source_id=values.pop("source", ""),
            image_files=tuple(encode_png(values.pop(f"{_IMAGE}{number}")) for number in numbers),
        ),
        reward=RewardResult(0, values.pop("rewards"), values.pop("reward"), values.pop("failures")),
        prompt_text=values.pop("prompt"),
        response_text=values.pop("completion"),
        completion=Completion(
            request_id=0,
            sample_index=0,
            token_ids=values.pop("response_ids"),
            logprobs=values.pop("rollout_logprobs"),
            finish_reason=values.pop("finish_reason"),
            weights_version=values.pop("weights_version", 0),
            **{name: values.pop(name) for name in _FLAT_OPTIONS if name in values},
        ),
    )
    if values:
        raise KeyError(min(values))
    return sample


# What a checkpoint says of each sample of a step to come beside its values: the place of the step, and its list there.
_PLACE, _LIST = "ahead_place", "ahead_list"
_LISTS = ("generated", "greedy", "used", "leftover", "dropped")  # the first two alone without dynamic sampling


def pack_steps(steps: Sequence[StepSamples]) -> tuple[list[LeftoverSample], OffPolicyState]:
    """Return the samples of steps to come, in order, as a checkpoint keeps them."""
    found = [
        LeftoverSample({**kept.record, _PLACE: place, _LIST: name}, kept.arrays)
        for place, step in enumerate(steps)
        for name in (_LISTS[:2] if step.used is step.generated else _LISTS)
        for kept in to_leftover(getattr(step, name))
    ]
    counts = {name: [getattr(step, name) for step in steps] for name in ("num_stale", "num_without_signal")}
    return found, OffPolicyState(versions=[step.version for step in steps], **counts)


def unpack_steps(leftover: Sequence[LeftoverSample], state: OffPolicyState) -> list[StepSamples]:
    """Return what ``pack_steps`` was called on.

    Raises:
        DamagedDirectory: the samples are not those of as many steps as the state tells of.
    """
    steps: list[dict[str, list[Sample]]] = [{"generated": []} for _ in state.versions]
    for item in leftover:
        record = dict(item.record)
        place, name = record.pop(_PLACE, -1), record.pop(_LIST, "")
        if not (isinstance(place, int) and 0 <= place < len(steps) and name in _LISTS):
            raise DamagedDirectory(f"the checkpoint is damaged: a sample is of step {place!r} of {len(steps)} to come")
        steps[place].setdefault(name, []).extend(from_leftover([LeftoverSample(record, item.arrays)]))
    counts = zip(state.num_stale, state.num_without_signal, state.versions, strict=True)
    return [
        StepSamples(**{"used": step["generated"], **step}, num_stale=stale, num_without_signal=useless, version=version)
        for step, (stale, useless, version) in zip(steps, counts, strict=True)
    ]
