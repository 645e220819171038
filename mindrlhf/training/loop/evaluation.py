"""The evaluations of a run: when one is due, what it finds, and whether the run has stopped getting better."""

import copy
import sys
from collections.abc import Callable

from mindrlhf.config.evaluation import ACCURACY
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.evaluation.best import best_step, num_since_best
from mindrlhf.evaluation.divergence import RewardWatch
from mindrlhf.observe.timing import StageTimer
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.sampling.in_step import Rollout


class Evaluations:
    """Samples the held-out prompts when it is time.

    Attributes:
        reward_watch: warns where the reward of training rises and the accuracy falls.
    """

    def __init__(self, config: GrpoConfig, rollout: Rollout, progress: Progress, timer: StageTimer, num_steps: int):
        self._config = config.evaluation
        self._rollout = rollout
        self._progress = progress
        self._timer = timer
        self._num_steps = num_steps
        self.reward_watch = RewardWatch()

    def run(self, settle: Callable[[], None]) -> dict[str, float]:
        """Return the metrics of the evaluation that is due, empty when none is; its time counts to no step.

        Args:
            settle: returns when the generator does nothing.
        """
        if not self.is_due():
            return {}
        rollout, step, choice = self._rollout, self._progress.step, self._config
        settle()
        sampler = copy.copy(rollout.sampler)  # which has a step's wait for rewards to itself
        with self._timer.stage("evaluation"):
            evaluation = rollout.held_out.run(sampler, step)
            more = {name: one.run(sampler, step) for name, one in rollout.more_held_out.items()}
        if choice.best_by != ACCURACY:
            judge = more[choice.best_set] if choice.best_set else evaluation
            evaluation = evaluation.judged_on(judge, choice.best_set, choice.best_metric)
        self._progress.evaluations.append(evaluation)
        if parted := self.reward_watch.review(evaluation):
            print(f"warning: {parted}", file=sys.stderr, flush=True)
        metrics = evaluation.metrics()
        for name, one in more.items():
            metrics.update(one.set_metrics(name))
        return {**metrics, "timing/evaluation": self._timer.finish_step()["timing/evaluation"]}

    def has_converged(self) -> bool:
        """Return whether ``evaluation.best_by`` has not risen for ``evaluation.patience`` evaluations; say so."""
        patience, evaluations = self._config.patience, self._progress.evaluations
        has_converged = patience > 0 and num_since_best(evaluations) >= patience
        if has_converged and self._progress.step < self._num_steps:
            print(
                f"mindrlhf: ended after step {self._progress.step}: the {self._config.best_by} of step "
                f"{best_step(evaluations)} was not exceeded by {patience} evaluations since",
                flush=True,
            )
        return has_converged

    def is_due(self) -> bool:
        step, every = self._progress.step, self._config.every_steps
        if not self._rollout.held_out:
            return False
        if step == 0:
            return self._config.before_training and not self._progress.evaluations
        return step == self._num_steps or bool(every and step % every == 0)
