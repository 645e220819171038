"""Record of one step of the loop: samples, rows, log-probabilities, advantages, updates, metrics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from mindrlhf.rollout.samples import Sample, groups_that_teach
from mindrlhf.system.records import record
from mindrlhf.training.batch import Batch
from mindrlhf.training.results import UpdateResult

T = TypeVar("T")


@record
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
        greedy: the likeliest response to each prompt, where the objective needs them.
        version: of the weights that generated them, but for those that an earlier step left over.
        rollout_s: seconds that sampling took beside the loop; None where it is a stage of the loop, or was done before
            the run was resumed.
        num_unfinished: responses that go on in the next step.
    """

    generated: list[Sample]
    used: list[Sample]
    num_stale: int = 0
    num_without_signal: int = 0
    leftover: list[Sample] = field(default_factory=list)
    dropped: list[Sample] = field(default_factory=list)
    greedy: list[Sample] = field(default_factory=list)
    version: int = 0
    rollout_s: float | None = None
    num_unfinished: int = 0

    def scored(self) -> "StepSamples":
        """Return it without the used samples that are not scored, and without a sample that they leave alone."""
        members = Counter(sample.group for sample in self.used)
        left = Counter(sample.group for sample in self.used if sample.is_scored)
        if members == left and all(sample.is_scored for sample in self.greedy):
            return self
        unknown = {sample.group for sample in self.greedy if not sample.is_scored}
        unknown |= {group for group, count in members.items() if left[group] < min(count, 2)}
        kept = [sample.is_scored and sample.group not in unknown for sample in self.used]
        used = [sample for sample, is_kept in zip(self.used, kept) if is_kept]
        groups, has_signal = groups_that_teach(used)
        same = {*groups[~has_signal].tolist()}
        return replace(
            self,
            used=used,
            num_stale=sum(kept[: self.num_stale]),
            num_without_signal=sum(sample.group in same for sample in used),
        )

    def num_older(self, version: int) -> int:
        """Return how many of the used samples, at their head, are of older weights than ``version``."""
        return self.num_stale if self.version == version else len(self.used)


@dataclass
class Step:
    """A step, as :meth:`mindrlhf.training.loop.trainer.Trainer.step` fills it from top to bottom.

    Lists of arrays have one array [generated tokens] for each sample: the advantages for every used one, the others for
    those in rows, in the order of ``batches``.

    Attributes:
        number: of the step, from 1.
        version, weights: number and digest of the weights that it begins with.
        kl_coefficient: in its updates.
        samples: all that was sampled for it.
        computed: which of the used samples are in rows, bool [used].
        batches: the rows, one batch for each optimiser update of a pass.
        advantages: float64; None until they are known.
        old_logprobs: float32, of the policy that generated them, as the loss takes them.
        reference_logprobs: float32; empty without a reference model.
        values: float64, the critic's; None without one.
        train_logprobs: float32, under the weights that the step begins with.
        updates: passes in order.
        lr: of the last update; None when there was none.
        metrics: what the parts of the loop say of it.
    """

    number: int
    version: int
    weights: str
    kl_coefficient: float
    samples: StepSamples
    computed: np.ndarray | None = None
    batches: list[Batch] = field(default_factory=list)
    baselines: np.ndarray | None = None  # float64 [used], rewards of the greedy responses
    advantages: list[np.ndarray] | None = None
    old_logprobs: list[np.ndarray] = field(default_factory=list)
    reference_logprobs: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] | None = None
    train_logprobs: list[np.ndarray] = field(default_factory=list)
    updates: list[UpdateResult] = field(default_factory=list)
    lr: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> list[Sample]:
        """The samples that are in rows."""
        return self.chosen(self.samples.used)

    def chosen(self, of_used: Sequence[T]) -> list[T]:
        """Return those of the samples in rows, of one thing for each used sample."""
        return [one for one, is_computed in zip(of_used, self.computed, strict=True) if is_computed]

    def num_chosen(self, num_first: int) -> int:
        """Return how many of the first used samples are in rows."""
        return int(self.computed[:num_first].sum())

    def samples_of(self, position: int) -> list[Sample]:
        """Return the samples of batch number ``position``."""
        start = sum(batch.num_samples for batch in self.batches[:position])
        return self.trained[start : start + self.batches[position].num_samples]
