"""Accuracy on held-out prompts, with an interval that says how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.data.mindrecord import PromptRecord
from mindrlhf.evaluation.statistics import bootstrap_interval
from mindrlhf.rollout.samples import Sample, Sampler, reward_matrix
from mindrlhf.rollout.types import SamplingParams

# Separates the seeds of evaluation from those of training steps.
_EVALUATION_STREAM = 0x65766C


@dataclass(frozen=True)
class Evaluation:
    """The scored samples of one model on a set of prompts."""

    step: int
    verifier: str
    num_samples: int
    samples: tuple[Sample, ...]  # ordered by prompt, then sample

    @property
    def scores(self) -> np.ndarray:
        """Rewards of the verifier that counts as accuracy, float64 [prompts, num_samples]."""
        return self.by_verifier(self.verifier)

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self.samples) // self.num_samples

    def by_verifier(self, name: str) -> np.ndarray:
        """Return the rewards of one verifier, float64 [prompts, num_samples]."""
        return reward_matrix(self.samples, self.num_samples, name)

    def metrics(self) -> dict[str, float]:
        """Return ``eval/accuracy`` with its 95 % interval, and the mean of every verifier and of the length."""
        per_prompt = self.scores.mean(axis=1)
        interval = bootstrap_interval(per_prompt)
        values = {
            "eval/accuracy": interval.mean,
            "eval/accuracy_low": interval.low,
            "eval/accuracy_high": interval.high,
        }
        for name in self.samples[0].rewards:
            values[f"eval/{name}/mean"] = self.by_verifier(name).mean()
        values["eval/response_length"] = np.mean([len(sample.response_ids) for sample in self.samples])
        return {name: float(value) for name, value in values.items()}


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts and how to sample them; each model gets the same random streams."""

    records: Sequence[PromptRecord]
    num_samples: int
    verifier: str
    sampling: SamplingParams
    seed: int

    def run(self, sampler: Sampler, step: int) -> Evaluation:
        """Sample and score every prompt with the generator's current weights."""
        samples = sampler.draw(self.records, self.num_samples, self.sampling, (self.seed, _EVALUATION_STREAM))
        return Evaluation(step, self.verifier, self.num_samples, tuple(samples))
