"""Scores completions in worker processes, under a time limit, while others are still being generated."""

import math
from collections import deque
from collections.abc import Iterator, Sequence

from mindrlhf.errors import UserError
from mindrlhf.rewards.dispatcher import Dispatcher
from mindrlhf.rewards.registry import check, check_selection
from mindrlhf.rewards.types import RewardInput, RewardResult
from mindrlhf.rewards.worker_process import Task


class RewardPool:
    """Worker processes that score completions by a weighted set of verifiers.

    ``timeout_s`` is the time one verifier may take for one sample. A verifier that takes longer, raises, or
    brings its process down gives the sample ``failure_value`` for its part, with the reason in
    ``RewardResult.failures`` (``"timeout"``, ``"ValueError: ..."``, ``"worker died: ..."``); a worker that hung
    is killed with its process group and replaced. The other verifiers' parts of the sample are computed all the
    same (the ones already done, once more), as are the other samples the worker held.

    For use from one thread, best as a context manager. After an error, and after ``close``, the pool is of no
    further use.

    Raises:
        UserError: unknown verifier, a file that does not load, counts or values that make no sense.
        RunFailure: the workers cannot be started.
    """

    def __init__(
        self,
        verifiers: Sequence[str],
        weights: Sequence[float],
        num_workers: int = 1,
        timeout_s: float = 10.0,
        failure_value: float = 0.0,
    ):
        check_selection(verifiers, weights)
        for verifier in verifiers:
            check(verifier)
        if num_workers < 1:
            raise UserError(f"{num_workers} reward workers: at least 1 is needed")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise UserError(f"the time limit of rewards is {timeout_s} s: it must be positive and finite")
        if not math.isfinite(failure_value):
            raise UserError(f"the reward of failed verifiers is {failure_value}: it must be finite")
        self._num_submitted = 0
        self._num_outstanding = 0
        self._unclaimed: deque[tuple[int, RewardResult]] = deque()
        self._is_closed = False
        self._dispatcher = Dispatcher(verifiers, weights, num_workers, timeout_s, failure_value)
        self._dispatcher.start()
        try:
            self._dispatcher.started.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, sample: RewardInput) -> None:
        """Queue one sample and return at once. Its result comes out of ``results``."""
        self._submit([sample])

    def results(self) -> Iterator[RewardResult]:
        """Yield the results of all samples submitted so far, each as soon as it is there, in any order.

        Ends when nothing is outstanding; samples may be submitted meanwhile.

        Raises:
            UserError: a verifier returned something other than a finite number.
        """
        for _, result in self._finished():
            yield result

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """Score ``samples`` and return the results in their order.

        Raises:
            UserError: a verifier returned something other than a finite number.
        """
        assert self._num_outstanding == 0, "score() needs a pool without outstanding samples: take results() first"
        first = self._num_submitted
        self._submit(samples)
        by_sequence = dict(self._finished())
        return [by_sequence[first + i] for i in range(len(samples))]

    def close(self) -> None:
        """Kill the workers. Results not taken are lost. Calling it again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._dispatcher.stop()
            self._dispatcher.close_wake_pipe()

    def _submit(self, samples: Sequence[RewardInput]) -> None:
        assert not self._is_closed, "the reward pool is closed"
        tasks = [Task(self._num_submitted + i, sample) for i, sample in enumerate(samples)]
        self._num_submitted += len(tasks)
        self._num_outstanding += len(tasks)
        self._dispatcher.add(tasks)

    def _finished(self) -> Iterator[tuple[int, RewardResult]]:
        while self._num_outstanding:
            assert not self._is_closed, "the reward pool is closed"
            while not self._unclaimed:
                batch = self._dispatcher.finished.get()
                if isinstance(batch, BaseException):
                    self.close()
                    raise batch
                self._unclaimed.extend(batch)
            self._num_outstanding -= 1
            yield self._unclaimed.popleft()
