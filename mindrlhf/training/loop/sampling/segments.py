"""Partial rollout: responses are given so many tokens at a time, and long ones go on in the next step.

A step that waits for the longest of its responses leaves most of the generator idle. Here a step begins with more
prompts in flight than it trains on. All their responses get at most ``rollout.segment_tokens`` tokens; that is repeated
until enough groups are complete. The step trains on the oldest of these, and the others go on first in the next step,
with its weights, from the tokens they have (partial rollout of Kimi k1.5, arXiv:2501.12599). A
response is made with ``rollout.max_segments`` weights at most: in the last it is finished.

Counts of tokens decide, never clocks: what a step trains on is the same whatever the number of servers and their speed.
"""

import math

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.sampling.in_step import Rollout, SamplingInStep
from mindrlhf.training.loop.sampling.rounds import Group, SegmentRounds, from_leftover, to_leftover
from mindrlhf.training.loop.step import StepSamples


class SamplingInSegments(SamplingInStep):
    """Takes the place of :class:`SamplingInStep`; see there for the methods."""

    def __init__(self, config: GrpoConfig, rollout: Rollout, progress: Progress, num_steps: int):
        super().__init__(rollout, progress, needs_greedy=False)
        self._rounds = SegmentRounds(config, rollout, rollout.prompts, config.rollout.max_segments)
        self._in_flight = config.rollout.in_flight
        self._num_responses = config.algorithm.num_generations
        self._num_groups = config.training.chunk_size * config.training.num_rollouts
        self._num_steps = num_steps
        self._going_on: list[Group] = []  # after the last step

    def sample(self, index: int) -> StepSamples:
        """Return the samples of step ``index``, from 0, those of the oldest complete groups.

        Raises:
            StopRequested: the run was asked to end, and the step has changed nothing yet.
        """
        prompts, version = self._rollout.prompts, self._progress.weights_version
        groups = from_leftover(self._progress.leftover, self._num_responses)
        first_new = prompts.stream.num_taken
        # Toward the end no more is begun than the last steps train on.
        left = (self._num_steps - index) * self._num_groups
        groups += self._rounds.begin(min(math.ceil(self._in_flight * self._num_groups), left) - len(groups))
        records = self._rounds.read(groups)
        with prompts.generating():
            groups = self._rounds.give_segment(groups, records, version)
            while sum(group.is_complete for group in groups) < self._num_groups:
                groups = self._rounds.give_segment(groups, records, version)
            used = [group for group in groups if group.is_complete][: self._num_groups]
            samples = self._rounds.score(used, records)
        self._rollout.generator.sleep()
        self._going_on = [group for group in groups if group.number not in {one.number for one in used}]
        num_stale = self._num_responses * sum(group.number < first_new for group in used)
        num_unfinished = sum(not response.finish_reason for group in self._going_on for response in group.responses)
        return StepSamples(samples, samples, num_stale, version=version, num_unfinished=num_unfinished)

    def keep_leftover(self, samples: StepSamples) -> None:
        """Keep the groups that the step, which is done, did not train on."""
        self._progress.leftover = to_leftover(self._going_on)
