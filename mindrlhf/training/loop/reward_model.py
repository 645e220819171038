"""A reward model as a part of the reward: rank 0's view of the scorers that the ranks hold."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.config.reward import REWARD_MODEL_NAME, RewardSection
from mindrlhf.data.packing import TokenSequence
from mindrlhf.rewards.types import RewardResult
from mindrlhf.rollout.samples import Sample
from mindrlhf.system.workers import Workers
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.training.team import Team

if TYPE_CHECKING:
    from mindrlhf.training.engine.actor import Actor


class RewardModel:
    """Scores responses on all ranks: the reward is the score of the text that ends with the last response token. Of an
    agent's episode that is the sequence of its first call.
    """

    def __init__(
        self,
        team: Team,
        rows: RowOptions,
        reward: RewardSection,
        uninterruptible: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self._team = team
        self._workers: Actor = Workers(team.call)
        self._rows = rows
        self._weight = reward.model_weight
        self._failure_value = reward.failure_value
        self._uninterruptible = uninterruptible

    def warm_up(self) -> None:
        """Compile the scorer for every row length."""
        for length in self._rows.row_lengths:
            ids = np.zeros(1, np.int32)
            rows = dataclasses.replace(self._rows, row_lengths=(length,))
            self._score([TokenSequence(ids, ids, {})], rows)

    def add_rewards(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the part "reward_model", and its weighted value in the reward.

        A score that is not finite, or of nothing, is replaced by ``reward.failure_value`` and noted in ``failures``.
        Equal responses to one prompt get the same score, to the last bit, though they may stand in rows that round
        differently.
        """
        first = [next(iter(sample.completion.sequences(sample.prompt.prompt_ids)), None) for sample in samples]
        texts = [one and (one[0].tobytes(), one[1].tobytes()) for one in first]
        distinct = {text: one for text, one in zip(texts, first) if one}  # not of agents that have asked nothing
        sequences = [TokenSequence(prompt, tokens, {}, generated) for prompt, tokens, generated in distinct.values()]
        with self._uninterruptible():
            scores = dict(zip(distinct, self._score(sequences, self._rows), strict=True)) if distinct else {}
        return [self._rewarded(sample, scores.get(text)) for sample, text in zip(samples, texts)]

    def _score(self, sequences: Sequence[TokenSequence], rows: RowOptions) -> list[float]:
        batch = make_batch(sequences, rows)
        results = self._workers.score_responses(per_rank=batch.per_rank(self._team.world_size))
        return [float(response[-1]) for response in batch.collect(results)]

    def _rewarded(self, sample: Sample, score: float | None) -> Sample:
        before, failures = sample.reward, sample.reward.failures
        if score is None or not math.isfinite(score):
            why = "had nothing to read" if score is None else f"returned {score}, not a finite number"
            failures = {**failures, REWARD_MODEL_NAME: why}
            score = self._failure_value
        parts, total = {**before.parts, REWARD_MODEL_NAME: score}, before.total + self._weight * score
        return dataclasses.replace(sample, reward=RewardResult(before.index, parts, total, failures, before.steps))
