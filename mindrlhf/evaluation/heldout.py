"""Accuracy on held-out prompts, with an interval that says how sure it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindrlhf.config.reward import REWARD_MODEL_NAME, RewardSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.errors import RunFailure
from mindrlhf.evaluation.statistics import accuracy_interval, pass_at_k
from mindrlhf.observe.fingerprint import digest_json
from mindrlhf.rollout.samples import Sample, Sampler, reward_matrix, verifier_names
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.system.records import record

NUM_SAMPLES_SHOWN = 3
NUM_SAMPLES_KEPT = 24  # of which a comparison shows those that changed
# Separates the seeds of evaluation from those of training steps.
_EVALUATION_STREAM = 0x65766C


@record
@dataclass(frozen=True)
class Evaluation:
    """The scores of one model on a set of prompts, and a few of its answers."""

    step: int
    verifier: str  # the one that counts as accuracy
    rewards: dict[str, np.ndarray]  # by verifier, float64 [prompts, num_samples]; NaN where it does not apply
    response_length: float  # mean tokens
    shown: list[dict[str, Any]]  # prompt, completion, answer, reward
    # Digest of prompts and answers: only evaluations with the same one can be compared.
    questions: str = ""
    num_unscored: int = 0  # samples, by no fault of the model; they count nowhere

    @classmethod
    def of(cls, step: int, verifier: str, samples: Sequence[Sample], num_samples: int) -> "Evaluation":
        """Summarise samples that are ordered by prompt.

        Raises:
            RunFailure: none of them is scored.
        """
        unscored = [sample.reward.unscored for sample in samples if not sample.is_scored]
        if len(unscored) == len(samples):
            raise RunFailure(f"none of {len(samples)} held-out samples could be scored ({unscored[0]}): fix that first")
        shown = [
            {
                "prompt": sample.prompt_text,
                "completion": sample.response_text,
                "answer": sample.prompt.answer,
                "reward": sample.reward.total if sample.is_scored else 0.0,
            }
            for sample in samples[::num_samples][:NUM_SAMPLES_KEPT]
        ]
        return cls(
            step=step,
            verifier=verifier,
            rewards={name: reward_matrix(samples, num_samples, name) for name in verifier_names(samples)},
            response_length=float(np.mean([len(sample.completion.token_ids) for sample in samples])),
            shown=shown,
            num_unscored=len(unscored),
            questions=digest_json([[sample.prompt_text, sample.prompt.answer] for sample in samples[::num_samples]]),
        )

    @property
    def scores(self) -> np.ndarray:
        """Rewards of the verifier that counts as accuracy, float64 [prompts that are scored whole, num_samples]."""
        rewards = self.rewards[self.verifier]
        return rewards[~np.isnan(rewards).any(axis=1)]

    @property
    def means(self) -> np.ndarray:
        """Mean of that verifier for each prompt, float64 [prompts]; NaN where it does not apply, or scored none."""
        return prompt_means(self.rewards[self.verifier])

    @property
    def accuracy(self) -> float:
        return float(np.nanmean(self.means))

    @property
    def pass_at_k(self) -> float:
        """Chance that one of a prompt's k = ``num_samples`` answers is right."""
        return float(pass_at_k(self.scores > 0.5, self.num_samples).mean())

    @property
    def num_prompts(self) -> int:
        return int(np.isfinite(self.means).sum())

    @property
    def num_samples(self) -> int:
        return self.scores.shape[1]

    def is_comparable(self, other: "Evaluation") -> bool:
        """Return True when both are accuracies by the same verifier on the same prompts."""
        return (self.questions, self.verifier) == (other.questions, other.verifier)

    def metrics(self) -> dict[str, float]:
        """Return ``eval/accuracy`` with its 95 % interval, and the mean of every verifier and of the length."""
        interval = accuracy_interval(known(self.means))
        values = {
            "eval/accuracy": interval.mean,
            "eval/accuracy_low": interval.low,
            "eval/accuracy_high": interval.high,
            "eval/response_length": self.response_length,
        }
        values.update({f"eval/{name}/mean": np.nanmean(rewards) for name, rewards in self.rewards.items()})
        if self.num_unscored:
            values |= {"eval/unscored": self.num_unscored, "eval/samples": self.rewards[self.verifier].size}
        return {name: float(value) for name, value in values.items()}

    def set_metrics(self, name: str) -> dict[str, float]:
        """Return accuracy with its 95 % interval, and with several samples pass@k, as metrics of a further set."""
        interval = accuracy_interval(known(self.means))
        values = {
            f"eval/{name}/accuracy": interval.mean,
            f"eval/{name}/accuracy_low": interval.low,
            f"eval/{name}/accuracy_high": interval.high,
        }
        if self.num_samples > 1:
            values[f"eval/{name}/pass@k"] = self.pass_at_k
        return {metric: float(value) for metric, value in values.items()}


def accuracy_verifier(config: GrpoConfig, set_name: str = "") -> str:
    """Return the verifier, or the reward model, whose mean a config calls accuracy; ``set_name`` is a further set's."""
    evaluation = config.evaluation
    return accuracy_of(evaluation.verifiers.get(set_name, evaluation.verifier), config.reward)


def accuracy_of(verifier: str, reward: RewardSection) -> str:
    """Return the same from the key ``evaluation.verifier`` and the rewards."""
    return verifier or (*reward.verifier_function, REWARD_MODEL_NAME)[0]


def best_step(evaluations: Sequence[Evaluation]) -> int | None:
    """Return the step of the best accuracy after training began, the earliest of equals.

    Only evaluations that can be compared with the last one count.
    """
    trained = [item for item in evaluations if item.step > 0 and item.is_comparable(evaluations[-1])]
    return max(trained, key=lambda item: item.accuracy).step if trained else None


def prompt_means(rewards: np.ndarray) -> np.ndarray:
    """Return the mean of each prompt's rewards that are known, float64 [prompts]; NaN where none is."""
    counts = (~np.isnan(rewards)).sum(axis=1)
    return np.divide(np.nansum(rewards, axis=1), counts, out=np.full(len(rewards), np.nan), where=counts > 0)


def known(means: np.ndarray) -> np.ndarray:
    """Return what is no NaN."""
    return means[~np.isnan(means)]


def paired(first: Evaluation, last: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of the prompts that both have scored, float64 [prompts] each; of other prompts all means."""
    if len(first.means) != len(last.means):
        return known(first.means), known(last.means)
    are_known = ~np.isnan(first.means) & ~np.isnan(last.means)
    return first.means[are_known], last.means[are_known]


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts and how to sample them; each model gets the same random streams."""

    records: Sequence[Prompt]
    num_samples: int
    verifier: str
    sampling: SamplingParams
    seed: int

    def sample(self, sampler: Sampler) -> list[Sample]:
        """Sample and score every prompt with the generator's current weights."""
        return sampler.sample(self.records, self.num_samples, self.sampling, (self.seed, _EVALUATION_STREAM))

    def run(self, sampler: Sampler, step: int) -> Evaluation:
        return Evaluation.of(step, self.verifier, self.sample(sampler), self.num_samples)
