"""What the ranks compute of a step: which of its samples, in which rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mindrlhf.config.derived import skips_zero_advantages
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.rollout.samples import Sample
from mindrlhf.training.batch import Batch, RowOptions, make_update_batch
from mindrlhf.training.loop.objective import Objective

T = TypeVar("T")


@dataclass(frozen=True)
class StepRows:
    """The rows of a step.

    Attributes:
        computed: which of the step's samples are in rows, bool [samples].
        batches: of those, one for each optimiser update of a pass.
        advantages: of all samples, float64 [generated tokens] each, where they are known before anything is computed.
    """

    computed: np.ndarray
    batches: list[Batch]
    advantages: list[np.ndarray] | None

    def chosen(self, of_samples: Sequence[T]) -> list[T]:
        """Return those of the computed samples."""
        return [one for one, is_computed in zip(of_samples, self.computed, strict=True) if is_computed]

    def num_chosen(self, num_first: int) -> int:
        """Return how many of the first samples of the step are computed."""
        return int(self.computed[:num_first].sum())


def make_step_rows(
    config: GrpoConfig,
    objective: Objective,
    samples: Sequence[Sample],
    baselines: np.ndarray | None,
    options: RowOptions,
) -> StepRows:
    """Put the samples of a step into rows; where those without a gradient are skipped, one of each update at least.

    Args:
        baselines: see :meth:`Objective.advantages`.
    """
    computed, advantages = np.ones(len(samples), bool), None
    if skips_zero_advantages(config):
        advantages = objective.advantages(samples, baselines=baselines)
        computed = objective.have_gradient(samples, advantages)
    if config.observe.sample_tokens:  # these are shown with what the ranks computed
        computed[: config.observe.samples_per_step] = True
    batches = []
    for part in np.array_split(np.arange(len(samples)), config.training.num_minibatches):
        if len(part):
            computed[part[0]] |= not computed[part].any()
            sequences = objective.sequences([samples[item] for item in part])
            batches.append(make_update_batch(sequences, computed[part], options))
    return StepRows(computed, batches, advantages)
