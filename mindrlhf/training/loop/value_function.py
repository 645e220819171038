"""Rank 0's part of a critic: values before the advantages, its updates after them, and its metrics."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.config.derived import critic_optimizer
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import RunFailure
from mindrlhf.observe.timing import StageTimer
from mindrlhf.system.workers import Workers
from mindrlhf.training.loop.step import Step
from mindrlhf.training.results import UpdateResult
from mindrlhf.training.team import Team

if TYPE_CHECKING:
    from mindrlhf.training.engine.critic import ActorCritic

# Returns that vary less than this are all equal: what is left is rounding.
EQUAL_RETURNS_STD = 1e-8


class ValueFunction:
    """The critic as the loop sees it; the ranks' part is :mod:`mindrlhf.training.engine.critic`."""

    def __init__(self, config: GrpoConfig, team: Team, timer: StageTimer, num_steps: int):
        self._workers: ActorCritic = Workers(team.call)
        self._timer = timer
        self._optimizer = critic_optimizer(config)
        self._num_iterations = config.training.num_iterations
        self._updates_per_step = config.training.num_minibatches * config.training.num_iterations
        self._num_updates = num_steps * self._updates_per_step

    def compute_values(self, step: Step) -> None:
        """Have the ranks compute the value before each token of the samples in rows."""
        values = []
        with self._timer.stage("values"):
            self._workers.take_turn(model="critic")
            for position, batch in enumerate(step.batches):
                values += batch.collect(self._workers.compute_values(batch=position))
        step.values = [part.astype(np.float64) for part in values]

    def update(self, step: Step, returns: Sequence[np.ndarray]) -> None:
        """Make the critic's updates of a step, for which the ranks have values and ``returns``; add its metrics.

        Raises:
            RunFailure: an update's loss or gradients are not finite.
        """
        losses, clip_fractions, norms = [], [], []
        update = (step.number - 1) * self._updates_per_step
        with self._timer.stage("update_critic"):
            for _ in range(self._num_iterations):
                for position, batch in enumerate(step.batches):
                    lr = self._optimizer.learning_rate(update, self._num_updates)
                    results = self._workers.update_critic(batch=position, lr=lr)
                    loss, num_clipped = np.sum([result.statistics for result in results], axis=0)
                    losses.append(loss)
                    clip_fractions.append(num_clipped / batch.num_tokens)
                    norms.append(self._check(results, step.number))
                    update += 1
            self._workers.take_turn(model="actor")
        step.metrics |= {
            **value_metrics(step.values, returns),
            "value/loss": float(np.mean(losses)),
            "value/clip_fraction": float(np.mean(clip_fractions)),
            "value/grad_norm": float(np.mean(norms)),
            "value/lr": lr,
        }

    def _check(self, results: Sequence[UpdateResult], number: int) -> float:
        norm = results[0].grad_norm
        if not math.isfinite(norm):
            raise RunFailure(
                f"step {number}: the gradient norm of the critic is {norm}, not finite, and it was not updated: "
                "lower critic.start_lr, and look at value/loss in metrics.jsonl for the step where it began"
            )
        return norm


def value_metrics(values: Sequence[np.ndarray], returns: Sequence[np.ndarray]) -> dict[str, float]:
    """Return what the values that the advantages were computed with say of the critic.

    Args:
        values, returns: float64 [response] for each sample.

    Returns:
        "value/mean", and "value/explained_variance", 1 - Var(R - V) / Var(R) over all tokens: 1 is a critic that
        foresees every return, 0 one that says the same of every state. It is left out where all returns are equal.
    """
    values, returns = np.concatenate(values), np.concatenate(returns)
    metrics = {"value/mean": float(values.mean())}
    if returns.std() > EQUAL_RETURNS_STD:
        metrics["value/explained_variance"] = float(1.0 - (returns - values).var() / returns.var())
    return metrics
