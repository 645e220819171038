"""Sampling beside the training: a thread of rank 0 has the samples of later steps made while a step is trained on.

With v(i) for the weights that step i begins with, from 0, and k for `rollout.off_policy_steps`, the thread does one
thing after the other:

    load v(0), make the samples of steps 0 to k, load v(1), make those of step k + 1, load v(2), ...

so that weights reach the generator at counts of steps, never at a moment that a clock decides. Before the loop
publishes v(i + 1), it waits until v(i) is loaded and the samples of step i + 1 are there. With k = 1 nothing is then
being generated: a server that dies on the way finds its weights in the weight buffer still.

With `rollout.asynchronous` weights are loaded as soon as they are published, at the end of a round of segments: what is
being generated goes on with them from the tokens it has, its prefix computed again (interruptible generation as in
AReaL, arXiv:2505.24298, section 4.1; without keeping keys and values of older weights, so that the log-probabilities
are those of one version each). That one thing is then up to the clock; see :mod:`.order`. A server that has died with
newer weights published begins its round anew with these.

A checkpoint holds what is not trained on, since the weights that generated it are gone.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from mindrlhf.checkpoint.algorithm_state import AsynchronousState
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.observe.timing import StageTimer
from mindrlhf.rollout.types import WeightsReplaced
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.sampling.in_step import Rollout, WholeSteps
from mindrlhf.training.loop.sampling.order import LoadOrder
from mindrlhf.training.loop.sampling.scheduler import Scheduler
from mindrlhf.training.loop.sampling.segments import Segments
from mindrlhf.training.loop.step import StepSamples


class PipelinedScheduler(Scheduler):
    """Samples in a background thread, which owns the generator and the maker except during ``settle``."""

    sleeps = False

    def __init__(
        self,
        config: GrpoConfig,
        rollout: Rollout,
        progress: Progress,
        num_steps: int,
        maker: WholeSteps | Segments,
        timer: StageTimer,
    ):
        super().__init__(rollout, progress, num_steps, maker)
        self._lag = config.rollout.off_policy_steps
        self._in_buckets = config.rollout.weight_buffer_gib > 0
        self._timer = timer
        self._order = LoadOrder(config, progress.algorithm.asynchronous) if config.rollout.asynchronous else None
        # Shared with the thread, and changed with this lock alone.
        self._changed = threading.Condition()
        self._asked = -math.inf  # the step that the loop is in, none so far
        self._version = 0  # that the servers have
        self._pending: int | None = None  # in the weight buffer, and not loaded yet
        self._ready = deque((step, None) for step in self._restored)  # in order, each with the seconds it took
        self._failure: BaseException | None = None
        self._is_working, self._is_paused, self._is_closed = False, True, False
        self._worked_s, self._since_s, self._sampled_s = 0.0, 0.0, 0.0
        self._step_s = self._worked_before_s = 0.0  # when the step began
        self._has_begun = False
        self._thread = threading.Thread(target=self._work, name="rollout", daemon=True)
        self._thread.start()

    def load(self, version: int, bucket: int) -> None:
        with self._changed:
            self._pending = version
            self._changed.notify_all()
            if self._in_buckets:  # the next takes the place of this one in the buffer
                self._wait_for(lambda: self._pending is None)

    def sample(self, index: int) -> StepSamples:
        """Return the samples of step ``index``, and have those of step ``index`` + k made.

        Raises:
            StopRequested: before the first step that this process does, as nothing is lost by it.
        """
        with self._changed:
            self._step_s, self._worked_before_s = time.perf_counter(), self._total_s()
        interruptible = contextlib.nullcontext if self._has_begun else self._rollout.prompts.interruptible
        with interruptible(), self._timer.stage("rollout_wait"):
            with self._changed:
                self._asked, self._is_paused = index, False
                self._changed.notify_all()
                self._wait_for(lambda: bool(self._ready))
                step, seconds = self._ready.popleft()
                self._num_ready = len(self._ready)
            samples = self._maker.take(step, self._progress.weights_version)
        self._has_begun = True
        if self._rollout.sampler.reward_model is not None:
            with self._timer.stage("reward_model"):  # it scores on the ranks, which have the time now
                add = self._rollout.sampler.add_model_rewards
                used = add(samples.used)
                samples = dataclasses.replace(samples, generated=used, used=used, greedy=add(samples.greedy))
        return dataclasses.replace(samples, rollout_s=seconds)

    def end_step(self) -> None:
        """Do nothing: samples not trained on stay with the thread."""

    def free_buffer(self, next_step: int) -> None:
        """Return when the published weights are loaded; in steps also when the samples of ``next_step`` are there.

        Weights that come in buckets find nothing being generated.
        """
        needs_samples = self._order is None and next_step < self._num_steps
        with self._timer.stage("rollout_wait"), self._changed:
            self._wait_for(lambda: self._pending is None and (bool(self._ready) or not needs_samples))
            if self._in_buckets:
                self._pause()

    def settle(self) -> None:
        """See ``Scheduler``; the thread goes on with the next ``sample``."""
        with self._timer.stage("rollout_wait"), self._changed:
            self._pause()
            self._maker.save([step for step, _ in self._ready])
            if self._order is not None:
                self._progress.algorithm.asynchronous = AsynchronousState(self._order.num_rounds, self._version)

    def metrics(self, timings: Mapping[str, float]) -> dict[str, float]:
        """Return the shares of the step in which the ranks waited for samples, and in which the thread did nothing; and
        how many later steps' samples were ready when it began."""
        with self._changed:
            worked_s = self._total_s() - self._worked_before_s
        return {
            "async/idle_ranks": timings.get("timing/rollout_wait", 0.0) / timings["timing/all"],
            "async/idle_servers": max(0.0, 1.0 - worked_s / (time.perf_counter() - self._step_s)),
            "async/queue": float(self._num_ready),
        }

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        getattr(self._rollout.sampler.source, "cancel", self._rollout.generator.cancel)()
        self._thread.join()
        self._maker.close()
        if self._order is not None:
            self._order.close()

    def _pause(self) -> None:
        """Wait, with the lock held, until the thread has nothing to do, and until ``sample`` nothing more."""
        self._is_paused = True
        self._changed.notify_all()
        self._wait_for(lambda: not self._is_working and self._pending is None and self._due() is None)

    def _wait_for(self, is_reached: Callable[[], bool]) -> None:
        """Wait, with the lock held; raise what has ended the thread: what comes after it would fail too."""
        self._changed.wait_for(lambda: self._failure is not None or is_reached())
        if self._failure is not None:
            raise self._failure

    def _total_s(self) -> float:
        """Return how long the thread has worked, with the lock held."""
        return self._worked_s + (time.perf_counter() - self._since_s if self._is_working else 0.0)

    def _work(self) -> None:
        """Do what is due until there is an end to it."""
        try:
            while (work := self._next_work()) is not None:
                work()
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _next_work(self) -> Callable[[], None] | None:
        with self._changed:
            self._worked_s, self._is_working = self._total_s(), False
            while not self._is_closed:
                if (work := self._due()) is not None:
                    self._since_s, self._is_working = time.perf_counter(), True
                    return work
                self._changed.notify_all()
                self._changed.wait()
        return None

    def _due(self) -> Callable[[], None] | None:
        """Return what comes next: weights, if it is time for them; else samples; None when there is nothing to do."""
        # In steps: up to those of k steps later than the step of the loop and of the weights.
        last = min(self._asked, self._version - 1) + self._lag
        has_work = bool(self._version) and self._maker.next_step <= min(last, self._num_steps - 1)
        if order := self._order:
            can_load = self._pending is not None and order.may_load(self._pending)
            # In a replay weights may be due later than they are there: what comes before is done, whoever waits.
            waits = order.waits_for_next(self._version) or (self._is_paused and self._pending is None)
            has_work = bool(self._version) and not waits and self._maker.has_work(self._version)
        else:
            can_load = self._pending is not None and not has_work
        if can_load:
            return self._load
        return self._advance if has_work else None

    def _load(self) -> None:
        version = self._pending
        self._rollout.generator.update_weights(version)
        with self._changed:
            if self._order is not None:
                self._order.note(version)
            self._version, self._pending = version, None
            self._changed.notify_all()

    def _advance(self) -> None:
        start_s = time.perf_counter()
        try:
            steps = self._maker.advance(self._version)
        except WeightsReplaced:
            if self._order is None or self._order.is_replay or self._in_buckets:
                raise
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None or self._is_closed)
            return
        with self._changed:
            self._sampled_s += time.perf_counter() - start_s
            if self._order is not None:
                self._order.num_rounds += 1
            for step in steps:
                self._ready.append((step, self._sampled_s or None))
                self._sampled_s = 0.0
            self._changed.notify_all()
