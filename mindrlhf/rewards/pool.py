"""Scores completions in worker processes, under a time limit, while others are still being generated."""

import contextlib
import ipaddress
import math
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mindrlhf.errors import UserError
from mindrlhf.rewards.failure_log import FailureLog
from mindrlhf.rewards.judges.accounting import COUNTED
from mindrlhf.rewards.registry import COMPLETIONS, STEP_TEXTS, Reads, check_columns
from mindrlhf.rewards.selection import MAX_MAGNITUDE, Selection
from mindrlhf.rewards.types import RewardInput, RewardResult
from mindrlhf.sandbox.pool import Results, WorkerPool
from mindrlhf.system.handshake import SignedConnection

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
        if not abs(failure_value) <= MAX_MAGNITUDE:
            raise UserError(f"the reward of failed verifiers is {failure_value}: it must be finite")
        self._selection = selection
        self._names, self._weights = selection.names, list(selection.weights)
        self._failure_value = failure_value
        self._num_submitted = 0
        self._num_outstanding = 0
        self._samples: dict[int, tuple[RewardInput, list[int]]] = {}  # with the positions of their verifiers
        self._finished: queue.SimpleQueue[list[tuple[int, RewardResult]] | BaseException] = queue.SimpleQueue()
        self._unclaimed: deque[tuple[int, RewardResult]] = deque()
        self._is_closed = False
        self._positions: dict[tuple[tuple[str, ...], frozenset[str]], list[int]] = {}
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._log = FailureLog(failure_log) if failure_log is not None else None
        arguments = pool_arguments(selection, num_workers, timeout_s, memory_limit_mib)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_log)
            self._pool = WorkerPool(deliver=self._take, **arguments)
            stack.pop_all()
        self._reads = [Reads(**values) for values in self._pool.ready]
        self._reads_together = Reads.together(self._reads)

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

    def admit(self, connection: SignedConnection, node: str) -> None:
        """Have the verifiers of another node take part; its process has the same ``pool_arguments``.

        Raises:
            UserError, RunFailure: they cannot start there.
        """
        self._pool.admit(connection, node)

    def take_counts(self) -> dict[str, float]:
        """Return what judges have taken since this was last asked, summed over the samples (``judges.accounting``).

        Empty when no judge was asked. What a worker had asked when it was killed is not counted.
        """
        with self._counts_lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

    def submit(self, sample: RewardInput) -> None:
        """Queue one sample and return at once. Its result comes out of ``results``.

        Raises:
            UserError: the sample chooses a verifier that is not there to be chosen, or is left with none; or it lacks a
                column that a verifier needs.
        """
        self._submit([sample])

    def results(self) -> Iterator[RewardResult]:
        """Yield the results of all samples submitted so far, and meanwhile, in any order."""
        for _, result in self._results():
            yield result

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        assert self._num_outstanding == 0, "score() needs a pool without outstanding samples: take results() first"
        first = self._num_submitted
        self._submit(samples)
        by_sequence = dict(self._results())
        return [by_sequence[first + i] for i in range(len(samples))]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pool.close()
            self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()

    def _submit(self, samples: Sequence[RewardInput]) -> None:
        assert not self._is_closed, "the reward pool is closed"
        items = []
        for number, sample in enumerate(samples, self._num_submitted):
            positions = self._positions_for(sample)
            self._samples[number] = sample, positions
            items.append((number, positions, self._read_by_verifiers(sample), _num_chars(sample)))
        self._num_submitted += len(items)
        self._num_outstanding += len(items)
        self._pool.submit(items, "score")

    def _positions_for(self, sample: RewardInput) -> list[int]:
        """Return which verifiers apply to a sample."""
        kind = (sample.verifiers, frozenset(sample.extra))
        if kind not in self._positions:
            self._selection.check_choices(sample.verifiers, "samples")
            skipped = self._selection.skipped_positions(sample.verifiers)
            self._positions[kind] = [position for position in range(len(self._names)) if position not in skipped]
            for position in self._positions[kind]:
                check_columns(self._selection.verifiers[position], self._reads[position], sample.extra, "the samples")
        return self._positions[kind]

    def _read_by_verifiers(self, sample: RewardInput) -> list[Any]:
        """Return completion, answer, context and columns, as far as verifiers read them."""
        reads = self._reads_together
        context = {name: getattr(sample, name) for name in reads.context}
        if "turn_texts" in context and not sample.turn_texts:  # of a file of completions
            context["turn_texts"] = (sample.completion,)
        return [sample.completion, sample.answer, context, reads.of_columns(sample.extra)]

    def _take(self, results: Results | BaseException) -> None:
        """Take what the workers have found; called by the thread of the pool."""
        if isinstance(results, BaseException):
            self._finished.put(results)
        else:
            self._finished.put([(number, self._finish(number, outcomes)) for number, outcomes in results])

    def _finish(self, number: int, outcomes: Sequence[Any]) -> RewardResult:
        sample, positions = self._samples.pop(number)
        parts, failures, steps, weighted, unscored = {}, {}, {}, [], ""
        for position, outcome in zip(positions, outcomes):
            name = self._names[position]
            if isinstance(outcome, dict) and "outcome" in outcome:
                self._add_counts(outcome.get("counts"))
                outcome = outcome["outcome"]
            if isinstance(outcome, dict) and "unavailable" in outcome:
                unscored = unscored or f"{name}: {outcome['unavailable']}"
                continue
            reward, failure = _read_outcome(outcome)
            if failure:
                failures[name] = failure
                reward = self._failure_value
            elif isinstance(outcome, list):
                steps[name] = outcome
            parts[name] = reward
            weighted.append(self._weights[position] * reward)
        if self._log is not None:
            name, _, reason = unscored.partition(": ")
            self._log.write(sample, failures | ({name: reason} if unscored else {}))
        total = math.nan if unscored else math.fsum(weighted)
        return RewardResult(sample.index, parts, total, failures, steps, unscored)

    def _add_counts(self, counts: Any) -> None:
        if isinstance(counts, dict):
            with self._counts_lock:
                self._counts.update({name: number for name, number in counts.items() if _is_count(name, number)})

    def _results(self) -> Iterator[tuple[int, RewardResult]]:
        while self._num_outstanding:
            assert not self._is_closed, "the reward pool is closed"
            while not self._unclaimed:
                batch = self._finished.get()
                if isinstance(batch, BaseException):
                    self.close()
                    raise batch
                self._unclaimed.extend(batch)
            self._num_outstanding -= 1
            yield self._unclaimed.popleft()


def pool_arguments(
    selection: Selection, num_workers: int | None, timeout_s: float, memory_limit_mib: int
) -> dict[str, Any]:
    """Return the arguments of the ``WorkerPool`` that has verifiers, but for where its results go."""
    return {
        "name": "verifiers",
        "setup": "mindrlhf.rewards.worker:setup",
        "settings": {
            "verifiers": list(selection.verifiers),
            "options": [selection.options_for(verifier) for verifier in selection.verifiers],
        },
        "num_workers": num_workers,
        "timeout_s": timeout_s,
        "memory_limit_bytes": memory_limit_mib << 20,
        "python": selection.python,
    }


def reason_to_stay(reward: "RewardSection") -> str:
    """Return why verifiers run on node 0 alone, empty where they run on every node."""
    for option, text in reward.options.items():
        with contextlib.suppress(ValueError):
            host = urlsplit(text).hostname or ""
            if host == "localhost" or (host and ipaddress.ip_address(host).is_loopback):
                return f"reward.options has {option}: {text}, which each node would look for on itself"
    return ""


def _read_outcome(outcome: Any) -> tuple[float, str]:
    """Return the reward that a worker has sent, or why there is none."""
    if isinstance(outcome, float) and abs(outcome) <= MAX_MAGNITUDE:
        return outcome, ""
    if isinstance(outcome, dict):
        return 0.0, str(outcome.get("failed") or outcome.get("died") or "no reward")
    try:
        values = outcome if isinstance(outcome, list) else [outcome]
        if math.fsum(map(abs, values)) <= MAX_MAGNITUDE:
            return math.fsum(values), ""
    except TypeError:
        pass
    return 0.0, "no reward"


def _num_chars(sample: RewardInput) -> int:
    num_chars = len(sample.completion) + len(sample.prompt) + sum(map(len, sample.completions))
    return num_chars + (len(repr(sample.extra)) if sample.extra else 0)


def _is_count(name: str, number: Any) -> bool:
    return name in COUNTED and isinstance(number, (int, float)) and 0 <= number < math.inf
