"""Where a step's samples come from: generated within the step here, beside training in :mod:`.ahead`."""

from collections.abc import Mapping
from dataclasses import dataclass

from mindrlhf.rollout.samples import Sample
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.dynamic_sampling import StepSamples, from_leftover, to_leftover
from mindrlhf.training.loop.parts import Rollout


@dataclass(frozen=True)
class SampledStep:
    """What was sampled for a step.

    Attributes:
        samples: scored.
        greedy: the likeliest response to each prompt, where the objective needs them.
        version: of the weights that generated them, but for those that an earlier step left over.
        rollout_s: seconds that sampling took beside the loop; None where it is a stage of the loop, or was done before
            the run was resumed.
        num_unfinished: responses that go on in the next step.
    """

    samples: StepSamples
    greedy: list[Sample]
    version: int
    rollout_s: float | None = None
    num_unfinished: int = 0

    def num_stale(self, version: int) -> int:
        """Return how many of the used samples, at their head, are of older weights than ``version``."""
        return self.samples.num_stale if self.version == version else len(self.samples.used)


class SamplingInStep:
    """Samples when a step needs it, with the weights that the step begins with.

    Args:
        rollout: makes the samples.
        progress: of the run; holds what dynamic sampling leaves over.
        needs_greedy: whether to generate the likeliest responses as well.
    """

    def __init__(self, rollout: Rollout, progress: Progress, *, needs_greedy: bool):
        self._rollout = rollout
        self._progress = progress
        self._needs_greedy = needs_greedy

    def load(self, version: int, bucket: int) -> None:
        """Have the generator take the bucket of the weights that is on the board."""
        if bucket == 0:
            self._rollout.generator.wake()
        self._rollout.generator.update_weights(version)

    def sample(self, index: int) -> SampledStep:
        """Return the samples of step ``index``, from 0.

        Raises:
            StopRequested: the run was asked to end, and the step has changed nothing yet.
        """
        leftover = from_leftover(self._progress.leftover)
        samples, greedy = self._rollout.prompts.sample(index, leftover, needs_greedy=self._needs_greedy)
        self._rollout.generator.sleep()
        return SampledStep(samples, greedy, self._progress.weights_version)

    def keep_leftover(self, samples: StepSamples) -> None:
        """Keep what dynamic sampling left over in a step that is done."""
        self._progress.leftover = to_leftover(samples.leftover)

    def free_board(self, next_step: int) -> None:
        """Return when the weights on the board may be replaced by those that step ``next_step`` begins with."""

    def settle(self) -> None:
        """Return when the generator does nothing, and ``progress`` holds all samples not yet trained on."""

    def metrics(self, timings: Mapping[str, float]) -> dict[str, float]:
        """Return how busy ranks and servers were in a step of which ``timings`` tells the ranks' stages, in seconds."""
        return {}

    def close(self) -> None:
        """End what is still going on."""
