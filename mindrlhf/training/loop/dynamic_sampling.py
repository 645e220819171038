"""Which samples a step trains on: with dynamic sampling, prompts are drawn until all groups teach something.

DAPO: Yu et al. 2025 (arXiv:2503.14476), section 3.2. What is drawn beyond a step's needs is trained on in the next.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindrlhf.algorithms.overlong import complete
from mindrlhf.algorithms.selection import groups_with_signal
from mindrlhf.checkpoint.carried import CarriedSample
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.rollout.samples import Sample

Group = list[Sample]
Draw = Callable[[int, int], list[Sample]]  # (number of prompts, number of the first group) -> their samples


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, each kind in whole groups. Those drawn are the used (but the stale), carried, dropped.

    Attributes:
        drawn: what the generator made in this step.
        used: what the step trains on; groups are numbered from 0.
        num_stale: how many of ``used``, at its head, the step before drew.
        num_without_signal: how many of ``used`` are of groups whose samples all earned the same.
        carried: for the next step.
        dropped: of groups whose samples all earned the same; nothing trains on them.
    """

    drawn: list[Sample]
    used: list[Sample]
    num_stale: int
    num_without_signal: int
    carried: list[Sample]
    dropped: list[Sample]

    @property
    def fresh(self) -> list[Sample]:
        """Those of ``used`` that the weights drew which the step begins with."""
        return self.used[self.num_stale :]


class GroupSampling:
    """Collects the groups of a step.

    Without ``algorithm.dynamic_sampling`` one round is drawn, and all of it is used. With it each round asks for as
    many chunks of prompts as could fill the step, so that less than a chunk is left over. When the step has drawn
    ``algorithm.max_oversampling`` times its prompts, groups without signal fill what is still missing.
    """

    def __init__(self, config: GrpoConfig):
        self.is_dynamic = config.algorithm.dynamic_sampling
        self._chunk_size = config.training.chunk_size
        self._num_groups = config.training.chunk_size * config.training.num_rollouts
        self._max_prompts = config.algorithm.max_oversampling * self._num_groups

    def collect(self, draw: Draw, carried: Sequence[Sample]) -> StepSamples:
        """Draw the samples of a step; ``carried`` are those that the step before left, which are used first."""
        if not self.is_dynamic:
            assert not carried, "only dynamic sampling carries samples over"
            drawn = draw(self._num_groups, 0)
            return StepSamples(drawn, drawn, 0, sum(map(len, _split(drawn)[1])), [], [])
        chosen = _groups(carried)
        num_stale_groups = len(chosen)
        drawn: list[Sample] = []
        without_signal: list[Group] = []
        num_prompts = 0
        while len(chosen) < self._num_groups and num_prompts < self._max_prompts:
            missing = self._num_groups - len(chosen)
            count = min(-(-missing // self._chunk_size) * self._chunk_size, self._max_prompts - num_prompts)
            samples = draw(count, num_prompts)
            num_prompts += count
            drawn += samples
            taught, useless = _split(samples)
            chosen += taught
            without_signal += useless
        used, surplus = chosen[: self._num_groups], chosen[self._num_groups :]
        assert len(surplus) < self._chunk_size, f"{len(surplus)} groups are left over from chunks of {self._chunk_size}"
        num_missing = self._num_groups - len(used)
        fillers, dropped = without_signal[:num_missing], without_signal[num_missing:]
        return StepSamples(
            drawn=drawn,
            used=_numbered(used + fillers),
            num_stale=sum(map(len, chosen[:num_stale_groups])),
            num_without_signal=sum(map(len, fillers)),
            carried=_flat(surplus),
            dropped=_flat(dropped),
        )


class SampleLedger:
    """Accounts for every sample of a run: what was generated has been used, is carried over, or was dropped.

    Args:
        state: what :meth:`state` returned at the checkpoint that the run goes on from.
    """

    def __init__(self, state: Mapping[str, int] | None = None):
        self._totals = dict(state or {"generated": 0, "used": 0, "dropped": 0, "carried": 0})

    def state(self) -> dict[str, int]:
        """Return the totals so far, and how many samples are carried over, as JSON values."""
        return dict(self._totals)

    def add(self, step: StepSamples) -> dict[str, float]:
        """Enter a step and return its metrics.

        Raises:
            AssertionError: the sums of the step or of the run do not add up.
        """
        generated, used, dropped, carried = map(len, (step.drawn, step.used, step.dropped, step.carried))
        before = self._totals["carried"]
        assert before == step.num_stale, f"{before} samples were carried over, {step.num_stale} are used"
        assert before + generated == used + carried + dropped, (
            f"{before} samples carried over and {generated} generated are not {used} used, {carried} carried over and "
            f"{dropped} dropped"
        )
        for name, count in (("generated", generated), ("used", used), ("dropped", dropped)):
            self._totals[name] += count
        self._totals["carried"] = carried
        totals = self._totals
        assert totals["generated"] == totals["used"] + totals["carried"] + totals["dropped"], (
            f"the samples of the run do not add up: {totals}"
        )
        return {
            "samples/generated": float(generated),
            "samples/used": float(used),
            "samples/used_stale": float(step.num_stale),
            "samples/used_without_signal": float(step.num_without_signal),
            "samples/used_cut": float(np.sum(~complete([sample.finish_reason for sample in step.used]))),
            "samples/carried": float(carried),
            "samples/dropped_without_signal": float(dropped),
            "samples/total_generated": float(totals["generated"]),
            "samples/total_used": float(totals["used"]),
            "samples/total_dropped_without_signal": float(totals["dropped"]),
        }


def to_carried(samples: Sequence[Sample]) -> list[CarriedSample]:
    """Return samples as a checkpoint keeps them."""
    carried = []
    for sample in samples:
        values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        carried.append(CarriedSample({name: values[name] for name in values.keys() - arrays.keys()}, arrays))
    return carried


def from_carried(carried: Sequence[CarriedSample]) -> list[Sample]:
    """Return what ``to_carried`` was called on.

    Raises:
        UserError: the samples of the checkpoint lack a value, or have one too many.
    """
    fields = {field.name for field in dataclasses.fields(Sample)}
    samples = []
    for index, item in enumerate(carried):
        values: dict[str, Any] = {**item.record, **item.arrays}
        if values.keys() != fields:
            wrong = min(values.keys() ^ fields)
            raise DamagedDirectory(f"the checkpoint is damaged: {wrong!r} of carried sample {index} is missing or new")
        samples.append(Sample(**values))
    return samples


def _groups(samples: Sequence[Sample]) -> list[Group]:
    groups: dict[int, Group] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def _split(samples: Sequence[Sample]) -> tuple[list[Group], list[Group]]:
    """Return the groups with signal and those without, each in order.

    The verifiers' rewards decide, before any penalty for length: of two right answers the shorter is no better.
    """
    rewards = np.array([sample.reward for sample in samples], np.float64)
    numbers, has_signal = groups_with_signal(rewards, np.array([sample.group for sample in samples]))
    teaches = dict(zip(numbers.tolist(), has_signal.tolist()))
    groups = _groups(samples)
    return [g for g in groups if teaches[g[0].group]], [g for g in groups if not teaches[g[0].group]]


def _numbered(groups: Sequence[Group]) -> list[Sample]:
    return [dataclasses.replace(sample, group=number) for number, group in enumerate(groups) for sample in group]


def _flat(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group]
