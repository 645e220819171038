"""Fully asynchronous training: a thread of rank 0 has groups generated without end, and a step takes those that are
complete.

Responses get ``rollout.segment_tokens`` tokens at a time. New weights reach the servers at the end of such a round,
as soon as they are published: what is being generated goes on with them from the tokens it has, its prefix computed
again (interruptible generation as in AReaL, arXiv:2505.24298, section 4.1; without keeping keys and values of older
weights, so that the log-probabilities are those of one version each).

The bound is in versions. With v(i) for the weights that step i begins with, batch for the groups of a step and k for
`rollout.off_policy_steps`, the thread begins groups while begun <= (i + 1 + k) * batch, i being that of the weights it
has loaded. Group n, from 0, is of block n // batch. A step takes the groups that were complete first, but every one of
an earlier block than its own number: each is overtaken by one step at most, and no group is more than k + 1 versions
old.

One thing alone is up to the clock: before which round the weights were loaded. It is written to
``rollout_order.jsonl``, and all else follows from it, so that ``rollout.replay_order`` repeats a run bit for bit.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mindrlhf.checkpoint.algorithm_state import AsynchronousState
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.errors import UserError
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.rollout.replicas import WeightsReplaced
from mindrlhf.rollout.samples import Sample
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.sampling.busy import BusyTime
from mindrlhf.training.loop.sampling.in_step import Rollout
from mindrlhf.training.loop.sampling.order import ORDER_NAME, read_order
from mindrlhf.training.loop.sampling.rounds import Group, SegmentRounds, from_leftover, to_leftover
from mindrlhf.training.loop.step import StepSamples


class SamplingAsynchronously:
    """Takes the place of :class:`mindrlhf.training.loop.sampling.in_step.SamplingInStep`; see there for the methods.

    Args:
        wait_stage: context around each wait for samples.
    """

    sleeps = False

    def __init__(
        self,
        config: GrpoConfig,
        rollout: Rollout,
        progress: Progress,
        num_steps: int,
        *,
        wait_stage: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self._rollout = rollout
        self._progress = progress
        self._prompts = rollout.prompts.beside_the_loop()
        self._rounds = SegmentRounds(config, rollout, self._prompts, max_segments=None)
        self._num_responses = config.algorithm.num_generations
        self._num_groups = config.training.chunk_size * config.training.num_rollouts
        self._num_steps = num_steps
        self._staleness = config.rollout.off_policy_steps
        self._wait_stage = wait_stage
        self._busy = BusyTime()
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="scores")
        # Shared with the thread, and changed with this lock alone.
        self._changed = threading.Condition()
        self._pending: int | None = None  # version in the weight buffer that is not loaded yet
        self._failure: BaseException | None = None
        self._is_idle, self._is_paused, self._is_closed = True, False, False
        self._going_on: list[Group] = []
        self._complete: list[tuple[Group, Future[list[Sample]]]] = []  # in the order in which they were
        state = progress.algorithm.asynchronous or AsynchronousState(num_rounds=0, version=0)
        self._num_rounds, self._version = state.num_rounds, 0  # rounds done, version that the servers have
        self._restored_version = state.version
        self._replayed = read_order(config.rollout.replay_order)
        self._order = JsonlWriter(Path(config.run.output_dir) / ORDER_NAME, first_step=state.version)
        left = from_leftover(progress.leftover, self._num_responses)
        self._take_up(left, self._rounds.read(left))
        # Groups of blocks that later steps begin with, which are trained on already.
        first_open = progress.step * self._num_groups
        self._overtakers = {*range(first_open, self._prompts.stream.num_taken)} - {group.number for group in left}
        self._has_begun = False
        self._thread = threading.Thread(target=self._work, name="rollout", daemon=True)
        self._thread.start()

    def load(self, version: int, bucket: int) -> None:
        """Have the servers take the published weights, whole, at the end of the round they are in."""
        assert bucket == 0, "the weight buffer holds a part of the weights"
        with self._changed:
            self._pending = version
            self._changed.notify_all()

    def sample(self, index: int) -> StepSamples:
        """Return the samples of step ``index``: groups that are as old as may be, and those complete first.

        Raises:
            StopRequested: before the first step that this process does, as nothing is lost by it.
        """
        self._busy.begin_step()
        interruptible = contextlib.nullcontext if self._has_begun else self._rollout.prompts.interruptible
        with interruptible(), self._wait_stage():
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()
                self._wait_for(lambda: self._can_serve(index))
                chosen = self._choose(index)
            samples = [(group, future.result()) for group, future in chosen]
        self._has_begun = True
        version = self._progress.weights_version
        # Those of older weights first: the others alone tell how far generator and trainer are apart.
        samples.sort(key=lambda item: _is_fresh(item[0], version))
        used = [sample for _, members in samples for sample in members]
        num_stale = self._num_responses * sum(not _is_fresh(group, version) for group, _ in samples)
        with self._changed:
            num_unfinished = sum(not one.finish_reason for group in self._going_on for one in group.responses)
        times = {"rollout_s": self._busy.step_s() or None, "num_unfinished": num_unfinished}
        return StepSamples(used, used, num_stale, version=version, **times)

    def keep_leftover(self, samples: StepSamples) -> None:
        """Do nothing: what is not trained on stays with the thread."""

    def free_buffer(self, next_step: int) -> None:
        """Return when the weights in the weight buffer are loaded."""
        with self._wait_stage(), self._changed:
            self._wait_for(lambda: self._pending is None)

    def settle(self) -> None:
        """Let the thread finish its round, and put what is not trained on into ``progress``, as a checkpoint holds it.

        It goes on with the next ``sample``.
        """
        with self._wait_stage(), self._changed:
            self._is_paused = True
            self._wait_for(lambda: self._is_idle and self._pending is None)
            for _, future in self._complete:
                future.result()
            self._progress.leftover = to_leftover([*(group for group, _ in self._complete), *self._going_on])
            self._progress.algorithm.asynchronous = AsynchronousState(self._num_rounds, self._version)

    def metrics(self, timings: Mapping[str, float]) -> dict[str, float]:
        """Return how busy ranks and servers were since the step began, and how many later steps' groups are ready."""
        with self._changed:
            num_complete = len(self._complete)
        return {**self._busy.idle_metrics(timings), "async/queue": num_complete / self._num_groups}

    def close(self) -> None:
        """Break off what is being generated, and end the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._rollout.generator.cancel()
        self._thread.join()
        self._scorer.shutdown(cancel_futures=True)
        self._order.close()

    def _wait_for(self, is_reached: Callable[[], bool]) -> None:
        """Wait, with the lock held; raise what has ended the thread."""
        self._changed.wait_for(lambda: self._failure is not None or is_reached())
        if self._failure is not None:
            raise self._failure

    def _can_serve(self, index: int) -> bool:
        """Whether every group that step ``index`` must train on is complete, and enough others are.

        As many groups of earlier blocks are left as others were taken before them.
        """
        num_due = len(self._overtakers)
        num_here = sum(self._is_due(group, index) for group, _ in self._complete)
        return num_here == num_due and len(self._complete) >= self._num_groups

    def _choose(self, index: int) -> list[tuple[Group, Future[list[Sample]]]]:
        """Take the groups that are due, and fill up with those that were complete first."""
        places = sorted(
            range(len(self._complete)), key=lambda place: (not self._is_due(self._complete[place][0], index), place)
        )
        chosen = set(places[: self._num_groups])
        found = [item for place, item in enumerate(self._complete) if place in chosen]
        self._complete = [item for place, item in enumerate(self._complete) if place not in chosen]
        next_block = (index + 1) * self._num_groups
        taken = {group.number for group, _ in found} | self._overtakers
        self._overtakers = {number for number in taken if number >= next_block}
        return found

    def _is_due(self, group: Group, index: int) -> bool:
        return group.number < index * self._num_groups

    def _work(self) -> None:
        """Do what is due until there is an end to it."""
        try:
            while (work := self._next_work()) is not None:
                with self._busy.counting():
                    work()
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _next_work(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._is_closed:
                work = self._due()
                self._is_idle = work is None
                if work is not None:
                    return work
                self._changed.notify_all()
                self._changed.wait()
        return None

    def _due(self) -> Callable[[], None] | None:
        """Return what comes next: weights, if they are there; else a round; None when there is nothing to do."""
        if self._pending is not None and self._may_load(self._pending):
            return self._load
        waits_for_weights = self._replayed and self._replayed.get(self._version) == self._num_rounds
        # In a replay weights may be due later than they are there: what comes before is done, whoever waits.
        if waits_for_weights or not self._version or (self._is_paused and self._pending is None):
            return None
        return self._do_round if self._going_on or self._num_to_begin() > 0 else None

    def _may_load(self, version: int) -> bool:
        if self._replayed is None or version == self._restored_version:
            return True
        due = self._replayed.get(version - 1, self._num_rounds)
        if due < self._num_rounds:
            raise UserError(
                f"'rollout.replay_order': step {version} of that run began after {due} rounds, here {self._num_rounds} "
                "are done: give the run of this config, from its beginning"
            )
        return due == self._num_rounds

    def _load(self) -> None:
        version = self._pending
        self._rollout.generator.update_weights(version)
        with self._changed:
            if version != self._restored_version:  # else it stands there already, with the rounds of then
                self._order.write({"step": version - 1, "round": self._num_rounds})
            self._version = version
            self._pending = None
            self._changed.notify_all()

    def _num_to_begin(self) -> int:
        """Return how many groups may be begun with the weights that are loaded."""
        allowed = min((self._version + self._staleness) * self._num_groups, self._num_steps * self._num_groups)
        return max(0, allowed - self._prompts.stream.num_taken)

    def _do_round(self) -> None:
        """Give every response that goes on a segment of tokens, and begin with new ones where the bound allows.

        A round whose weights are gone, as a server has died in it, is begun anew with those that have replaced them.
        """
        groups = [*self._going_on, *self._rounds.begin(self._num_to_begin())]
        records = self._rounds.read(groups)
        try:
            groups = self._rounds.give_segment(groups, records, self._version)
        except WeightsReplaced:
            if self._replayed is not None:
                raise
            with self._changed:
                self._going_on = groups
                self._changed.wait_for(lambda: self._pending is not None or self._is_closed)
            return
        with self._changed:
            self._num_rounds += 1
            self._take_up(groups, records)
            self._changed.notify_all()

    def _take_up(self, groups: list[Group], records: dict[int, Prompt]) -> None:
        """Have complete groups scored, in order, beside what is generated next; the others go on."""
        self._going_on = [group for group in groups if not group.is_complete]
        for group in groups:
            if group.is_complete:
                self._complete.append((group, self._scorer.submit(self._rounds.score, [group], records)))


def _is_fresh(group: Group, version: int) -> bool:
    """Whether all tokens of a group are of one version of the weights."""
    return all(span == version for response in group.responses for span, _ in response.spans)
