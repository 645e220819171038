"""Scores completions in worker processes, under a time limit, while others are still being generated."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindrlhf.errors import UserError
from mindrlhf.rewards.dispatcher import Dispatcher
from mindrlhf.rewards.failure_log import FailureLog
from mindrlhf.rewards.registry import COMPLETIONS, STEP_TEXTS, check_columns
from mindrlhf.rewards.selection import MAX_MAGNITUDE, Selection
from mindrlhf.rewards.types import RewardInput, RewardResult, Task

if TYPE_CHECKING:
    from mindrlhf.config.reward import RewardSection

DEFAULT_MEMORY_LIMIT_MIB = 4096


class RewardPool:
    """Worker processes that score completions by a weighted set of verifiers.

    ``timeout_s`` is the time one verifier may take for one sample, and ``memory_limit_mib`` what one worker may
    allocate (0: no limit). A verifier that takes longer, raises, returns no finite number, or brings its process
    down gives the sample ``failure_value`` for its part, with the reason in ``RewardResult.failures``
    (``"timeout"``, ``"ValueError: ..."``, ``"returned nan, ..."``, ``"worker died: ..."``) and, with the sample, in
    the file ``failure_log``. With ``num_workers`` None there is one worker at first, and while samples wait there are
    more, up to one for each core that this process may use.

    A worker that hung is killed with all it has started, and replaced. The other verifiers' parts of
    the sample are computed all the same (the ones already done, once more), as are the other samples the worker held.

    For use from one thread, best as a context manager. After an error, and after ``close``, the pool is of no
    further use.

    Raises:
        UserError: unknown verifier, a file that does not load, counts or values that make no sense.
        RunFailure: the workers cannot be started.
    """

    def __init__(
        self,
        selection: Selection,
        num_workers: int | None = 1,
        timeout_s: float = 10.0,
        failure_value: float = 0.0,
        memory_limit_mib: int = DEFAULT_MEMORY_LIMIT_MIB,
        failure_log: Path | None = None,
    ):
        selection.check()
        if num_workers is not None and num_workers < 1:
            raise UserError(f"{num_workers} reward workers: at least 1 is needed")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise UserError(f"the time limit of rewards is {timeout_s} s: it must be positive and finite")
        if not abs(failure_value) <= MAX_MAGNITUDE:
            raise UserError(f"the reward of failed verifiers is {failure_value}: it must be finite")
        self._selection = selection
        self._num_submitted = 0
        self._num_outstanding = 0
        self._unclaimed: deque[tuple[int, RewardResult]] = deque()
        self._is_closed = False
        self._skipped: dict[tuple[tuple[str, ...], frozenset[str]], list[int]] = {}
        log = FailureLog(failure_log) if failure_log is not None else None
        self._dispatcher = Dispatcher(selection, num_workers, timeout_s, failure_value, memory_limit_mib << 20, log)
        self.remotes = self._dispatcher.remotes  # workers of other nodes: ``remotes.admit``
        self._dispatcher.start()
        try:
            self._reads = self._dispatcher.started.result()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, reward: "RewardSection", failure_log: Path | None = None) -> "RewardPool":
        return cls(
            Selection.from_config(reward),
            reward.num_workers,
            reward.timeout_s,
            reward.failure_value,
            reward.memory_limit_mib,
            failure_log,
        )

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def compares(self) -> bool:
        """Return whether a verifier reads ``RewardInput.completions``."""
        return any(COMPLETIONS in reads.context for reads in self._reads)

    @property
    def reads_steps(self) -> bool:
        """Return whether a verifier reads the texts of turns or of tokens."""
        return any(name in reads.context for reads in self._reads for name in STEP_TEXTS)

    def take_counts(self) -> dict[str, float]:
        """Return what judges have taken since this was last asked, summed over the samples (``judges.accounting``).

        Empty when no judge was asked. What a worker had asked when it was killed is not counted.
        """
        return dict(self._dispatcher.take_counts())

    def submit(self, sample: RewardInput) -> None:
        """Queue one sample and return at once. Its result comes out of ``results``.

        Raises:
            UserError: the sample chooses a verifier that is not there to be chosen, or is left with none; or it lacks a
                column that a verifier needs.
        """
        self._submit([sample])

    def results(self) -> Iterator[RewardResult]:
        """Yield the results of all samples submitted so far, and meanwhile, in any order."""
        for _, result in self._finished():
            yield result

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        assert self._num_outstanding == 0, "score() needs a pool without outstanding samples: take results() first"
        first = self._num_submitted
        self._submit(samples)
        by_sequence = dict(self._finished())
        return [by_sequence[first + i] for i in range(len(samples))]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._dispatcher.stop()
            self._dispatcher.close_wake_pipe()

    def _submit(self, samples: Sequence[RewardInput]) -> None:
        assert not self._is_closed, "the reward pool is closed"
        tasks = [
            Task(self._num_submitted + i, sample, self._skipped_positions(sample)) for i, sample in enumerate(samples)
        ]
        self._num_submitted += len(tasks)
        self._num_outstanding += len(tasks)
        self._dispatcher.add(tasks)

    def _skipped_positions(self, sample: RewardInput) -> list[int]:
        kind = (sample.verifiers, frozenset(sample.extra))
        if kind not in self._skipped:
            self._selection.check_choices(sample.verifiers, "samples")
            self._skipped[kind] = skipped = self._selection.skipped_positions(sample.verifiers)
            for position, (verifier, reads) in enumerate(zip(self._selection.verifiers, self._reads)):
                if position not in skipped:
                    check_columns(verifier, reads, sample.extra, "the samples")
        return self._skipped[kind]

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
