"""When samples are made: one scheduler with two numbers.

How old weights may be (``rollout.off_policy_steps``, in updates) and how long a segment is (``rollout.segment_tokens``,
in tokens; 0: whole responses). At lag 0 all is made within the step, here; above, beside the training:
:mod:`.pipelined`. A maker makes the samples, whole (:class:`.in_step.WholeSteps`) or by segments
(:class:`.segments.Segments`).

One choice is no number: ``rollout.asynchronous`` has the clock decide before which round of segments new weights are
loaded, while without it they wait until the samples of step i + k are there, so that a run can be repeated.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.sampling.in_step import Rollout, WholeSteps
from mindrlhf.training.loop.step import StepSamples

if TYPE_CHECKING:
    from mindrlhf.training.loop.sampling.segments import Segments


class Scheduler:
    """Samples when a step needs it, with the weights that the step begins with."""

    sleeps = True  # the generator, while the ranks compute

    def __init__(self, rollout: Rollout, progress: Progress, num_steps: int, maker: "WholeSteps | Segments"):
        self._rollout = rollout
        self._progress = progress
        self._num_steps = num_steps
        self._maker = maker
        self._restored = maker.restore()

    def load(self, version: int, bucket: int) -> None:
        """Have the generator take the bucket of the weights that is in the weight buffer."""
        if bucket == 0:
            self._rollout.generator.wake()
        self._rollout.generator.update_weights(version)

    def sample(self, index: int) -> StepSamples:
        """Return the samples of step ``index``, from 0.

        Raises:
            StopRequested: the run was asked to end, and the step has changed nothing yet.
        """
        version = self._progress.weights_version
        while not (complete := self._maker.advance(version)):
            pass
        samples = self._maker.take(complete[0], version)
        self._rollout.generator.sleep()
        return samples

    def end_step(self) -> None:
        """Keep in ``progress``, for a checkpoint, what a step that is done has left."""
        self._maker.save([])

    def free_buffer(self, next_step: int) -> None:
        """Return when the weights in the weight buffer may be replaced by those that step ``next_step`` begins with."""

    def settle(self) -> None:
        """Return when the generator does nothing, and ``progress`` holds all samples not yet trained on."""

    def metrics(self, timings: Mapping[str, float]) -> dict[str, float]:
        """Return how busy ranks and servers were in a step of which ``timings`` tells the ranks' stages, in seconds."""
        return {}

    def close(self) -> None:
        """End what is still going on."""
