"""The evaluations of a run: when one is due, and its metrics."""

import copy
from collections.abc import Callable

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.observe.timing import StageTimer
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.sampling.in_step import Rollout


class Evaluations:
    """Samples the held-out prompts when it is time."""

    def __init__(self, config: GrpoConfig, rollout: Rollout, progress: Progress, timer: StageTimer, num_steps: int):
        self._config = config.evaluation
        self._rollout = rollout
        self._progress = progress
        self._timer = timer
        self._num_steps = num_steps

    def run(self, settle: Callable[[], None]) -> dict[str, float]:
        """Return the metrics of the evaluation that is due, empty when none is; its time counts to no step.

        Args:
            settle: returns when the generator does nothing.
        """
        if not self.is_due():
            return {}
        rollout, step = self._rollout, self._progress.step
        settle()
        sampler = copy.copy(rollout.sampler)  # which has a step's wait for rewards to itself
        with self._timer.stage("evaluation"):
            evaluation = rollout.held_out.run(sampler, step)
            more = {name: held_out.run(sampler, step) for name, held_out in rollout.more_held_out.items()}
        self._progress.evaluations.append(evaluation)
        metrics = evaluation.metrics()
        for name, further in more.items():
            metrics.update(further.set_metrics(name))
        return {**metrics, "timing/evaluation": self._timer.finish_step()["timing/evaluation"]}

    def is_due(self) -> bool:
        step, every = self._progress.step, self._config.every_steps
        if not self._rollout.held_out:
            return False
        if step == 0:
            return self._config.before_training and not self._progress.evaluations
        return step == self._num_steps or bool(every and step % every == 0)
