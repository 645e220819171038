"""Which samples a step trains on: with dynamic sampling, prompts are sampled until all groups teach something.

DAPO: Yu et al. 2025 (arXiv:2503.14476), section 3.2. What is sampled beyond a step's needs is left over for the next.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.algorithms.overlong import complete
from mindrlhf.algorithms.selection import groups_with_signal
from mindrlhf.checkpoint.algorithm_state import SampleTotals
from mindrlhf.checkpoint.leftover import LeftoverSample, pack, unpack
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import Prompt, no_ids
from mindrlhf.images.pixels import encode_png
from mindrlhf.rewards.types import RewardResult
from mindrlhf.rollout.samples import Sample
from mindrlhf.rollout.types import Completion

# In checkpoints of earlier releases: with a number, the name of an image; and what not all of them say of a completion.
_IMAGE = "image"
_FLAT_OPTIONS = ("is_generated", "num_turns", "num_tool_calls", "num_tool_failures", "num_neutralised_answers")
_FLAT_OPTIONS += ("spans", "experts")

Group = list[Sample]
SampleRound = Callable[[int, int], list[Sample]]  # (number of prompts, number of the first group) -> their samples


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, each kind in whole groups; the generated are the used but the stale, leftover, dropped.

    Attributes:
        generated: in this step.
        used: what the step trains on; groups are numbered from 0.
        num_stale: how many of ``used``, at its head, the step before left over.
        num_without_signal: how many of ``used`` are of groups whose samples all earned the same.
        leftover: for the next step.
        dropped: of groups whose samples all earned the same; nothing trains on them.
    """

    generated: list[Sample]
    used: list[Sample]
    num_stale: int
    num_without_signal: int
    leftover: list[Sample]
    dropped: list[Sample]


class GroupSampling:
    """Collects the groups of a step.

    Without ``algorithm.dynamic_sampling`` there is one round, and all of it is used. With it each round asks for as
    many chunks of prompts as could fill the step, so that less than a chunk is left over. When the step has asked
    for ``algorithm.max_oversampling`` times its prompts, groups without signal fill what is still missing.
    """

    def __init__(self, config: GrpoConfig):
        self.is_dynamic = config.algorithm.dynamic_sampling
        self._chunk_size = config.training.chunk_size
        self._num_groups = config.training.chunk_size * config.training.num_rollouts
        self._max_prompts = config.algorithm.max_oversampling * self._num_groups

    def collect(self, sample_round: SampleRound, leftover: Sequence[Sample]) -> StepSamples:
        """Have the samples of a step made; ``leftover`` are those of the step before, which are used first."""
        if not self.is_dynamic:
            assert not leftover, "only dynamic sampling leaves samples over"
            generated = sample_round(self._num_groups, 0)
            return StepSamples(generated, generated, 0, sum(map(len, _split(generated)[1])), [], [])
        chosen = _groups(leftover)
        num_stale_groups = len(chosen)
        generated: list[Sample] = []
        without_signal: list[Group] = []
        num_prompts = 0
        while len(chosen) < self._num_groups and num_prompts < self._max_prompts:
            missing = self._num_groups - len(chosen)
            count = min(-(-missing // self._chunk_size) * self._chunk_size, self._max_prompts - num_prompts)
            samples = sample_round(count, num_prompts)
            num_prompts += count
            generated += samples
            taught, useless = _split(samples)
            chosen += taught
            without_signal += useless
        used, surplus = chosen[: self._num_groups], chosen[self._num_groups :]
        assert len(surplus) < self._chunk_size, f"{len(surplus)} groups are left over from chunks of {self._chunk_size}"
        num_missing = self._num_groups - len(used)
        fillers, dropped = without_signal[:num_missing], without_signal[num_missing:]
        return StepSamples(
            generated=generated,
            used=_numbered(used + fillers),
            num_stale=sum(map(len, chosen[:num_stale_groups])),
            num_without_signal=sum(map(len, fillers)),
            leftover=_flat(surplus),
            dropped=_flat(dropped),
        )


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
        assert before == step.num_stale, f"{before} samples were left over, {step.num_stale} are used"
        assert before + generated == used + leftover + dropped, (
            f"{before} samples left over before and {generated} generated are not {used} used, {leftover} left over "
            f"and {dropped} dropped"
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
                f"the checkpoint is damaged: {error} of leftover sample {index} is missing or new"
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


def _groups(samples: Sequence[Sample]) -> list[Group]:
    groups: dict[int, Group] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def _split(samples: Sequence[Sample]) -> tuple[list[Group], list[Group]]:
    """Return the groups with signal and those without, each in order.

    The verifiers' rewards decide, before any penalty for length: of two right answers the shorter is no better.
    """
    rewards = np.array([sample.reward.total for sample in samples], np.float64)
    numbers, has_signal = groups_with_signal(rewards, np.array([sample.group for sample in samples]))
    teaches = dict(zip(numbers.tolist(), has_signal.tolist()))
    groups = _groups(samples)
    return [g for g in groups if teaches[g[0].group]], [g for g in groups if not teaches[g[0].group]]


def _numbered(groups: Sequence[Group]) -> list[Sample]:
    return [dataclasses.replace(sample, group=number) for number, group in enumerate(groups) for sample in group]


def _flat(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group]
