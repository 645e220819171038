"""The pool's side of one reward worker: the samples it holds, and what it may say of them."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mindrlhf.rewards.judges.accounting import COUNTED
from mindrlhf.rewards.registry import Reads
from mindrlhf.rewards.selection import MAX_MAGNITUDE
from mindrlhf.rewards.types import RewardInput
from mindrlhf.rewards.worker import WorkerSettings
from mindrlhf.sandbox.worker_process import WorkerOutput, WorkerProcess
from mindrlhf.system import timeline

# A worker that holds samples, is in no call and says nothing for this long has lost them.
MAX_SILENCE_S = 30.0


@dataclass(slots=True)
class Task:
    """A sample on its way through the pool, and the verifiers that have failed on it so far."""

    sequence: int
    sample: RewardInput
    skipped: list[int] = field(default_factory=list)  # positions of the verifiers that do not apply
    failures: dict[int, str] = field(default_factory=dict)  # reason, by position of the verifier
    is_suspect: bool = False  # it was in a worker that broke between two calls, and is from now on scored alone


class RewardWorker(WorkerProcess):
    """A running worker and the tasks it holds."""

    def __init__(self, settings: WorkerSettings, output: WorkerOutput):
        super().__init__("mindrlhf.rewards.worker", asdict(settings), output)
        self._num_verifiers = len(settings.verifiers)
        self._last_sign_s = time.monotonic()
        self.reads: Reads | None = None  # of all its verifiers together, known once the worker is ready
        self.tasks: dict[int, Task] = {}
        self.counts: Counter[str] = Counter()
        self._busy = timeline.span("start", "verifiers", f"worker {self.pid}")

    @property
    def is_ready(self) -> bool:
        return self.reads is not None

    @property
    def suspect(self) -> Task | None:
        """The task it holds alone because that one may have broken a worker."""
        tasks = list(self.tasks.values())
        return tasks[0] if len(tasks) == 1 and tasks[0].is_suspect else None

    def give(self, tasks: Sequence[Task]) -> None:
        """Queue one batch of samples."""
        messages = []
        if not self.tasks:
            self._busy.end()
            self._busy = timeline.span("score", "verifiers", f"worker {self.pid}", samples=len(tasks))
        for task in tasks:
            sample = task.sample
            self.tasks[task.sequence] = task
            context = {name: getattr(sample, name) for name in self.reads.context}
            columns = self.reads.of_columns(sample.extra)
            texts = (sample.completion, sample.answer)
            messages.append([task.sequence, list(task.failures), task.skipped, *texts, context, columns])
        self._last_sign_s = time.monotonic()
        self.queue(messages)

    def take_finished(self, message: Any) -> list[tuple[Task, list[Any]]]:
        """Return the tasks that a message finishes, with their outcomes; one that makes no sense breaks the worker.

        What they took is added to ``counts``.
        """
        finished = []
        self._last_sign_s = time.monotonic()
        try:
            for sequence, outcomes, counts in message:
                task = self.tasks[sequence]
                if len(outcomes) != self._num_verifiers or not all(
                    _is_outcome(outcome, position, task) for position, outcome in enumerate(outcomes)
                ):
                    raise ValueError("these are no outcomes")
                self.counts.update({name: number for name, number in counts.items() if _is_count(name, number)})
                del self.tasks[sequence]
                finished.append((task, outcomes))
        except (TypeError, ValueError, KeyError, AttributeError):
            self.is_broken = True
        if not self.tasks:
            self._busy.end()
        return finished

    def has_lost_tasks(self) -> bool:
        """Whether it holds tasks and has done nothing about them for long; to be asked every second or so."""
        if not self.tasks or self.clock.running() is not None:
            self._last_sign_s = time.monotonic()
        if time.monotonic() - self._last_sign_s <= MAX_SILENCE_S:
            return False
        return not self.is_runnable()  # on a busy machine it may have waited for a processor


def _is_count(name: str, number: Any) -> bool:
    return name in COUNTED and isinstance(number, (int, float)) and 0 <= number < math.inf


def _is_outcome(outcome: Any, position: int, task: Task) -> bool:
    if isinstance(outcome, float):
        return abs(outcome) <= MAX_MAGNITUDE
    if outcome is None:
        return position in task.failures or position in task.skipped
    return isinstance(outcome, dict) and isinstance(outcome.get("failed"), str)
