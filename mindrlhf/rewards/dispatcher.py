"""The thread of the reward pool that keeps its workers busy, on time and alive."""

import math
import os
import queue
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rewards.failure_log import FailureLog
from mindrlhf.rewards.judges.accounting import COUNTED
from mindrlhf.rewards.registry import Reads
from mindrlhf.rewards.remote import RemoteNodes
from mindrlhf.rewards.selection import MAX_MAGNITUDE, Selection
from mindrlhf.rewards.types import RewardInput, RewardResult, Task
from mindrlhf.rewards.worker import WorkerSettings
from mindrlhf.sandbox.worker_process import PIPE_BROKEN, WorkerOutput, WorkerProcess
from mindrlhf.system import timeline

# A worker that holds samples, is in no call and says nothing for this long has lost them.
MAX_SILENCE_S = 30.0
OUT_OF_MEMORY = "signal SIGKILL"  # nobody here sends it to a worker that has not been given up


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
    def load(self) -> float:
        return len(self.tasks)

    @property
    def suspect(self) -> Task | None:
        """The task it holds alone because that one may have broken a worker."""
        tasks = list(self.tasks.values())
        return tasks[0] if len(tasks) == 1 and tasks[0].is_suspect else None

    def give(self, tasks: Sequence[Task]) -> None:
        messages = []
        if not self.tasks:
            self._busy.end()
            self._busy = timeline.span("score", "verifiers", f"worker {self.pid}", samples=len(tasks))
        for task in tasks:
            self.tasks[task.sequence] = task
            messages.append([task.sequence, list(task.failures), task.skipped, *task.read_by(self.reads)])
        self._last_sign_s = time.monotonic()
        self.queue(messages)

    def take_finished(self, message: Any) -> list[tuple[Task, list[Any]]]:
        """Return the tasks that a message finishes, with their outcomes; what they took is added to ``counts``."""
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

    def kill(self) -> str:
        self._busy.end()
        return super().kill()

    def has_lost_tasks(self) -> bool:
        if not self.tasks or self.clock.running() is not None:
            self._last_sign_s = time.monotonic()
        if time.monotonic() - self._last_sign_s <= MAX_SILENCE_S:
            return False
        return not self.is_runnable()  # on a busy machine it may have waited for a processor


def _is_count(name: str, number: Any) -> bool:
    return name in COUNTED and isinstance(number, (int, float)) and 0 <= number < math.inf


def _is_outcome(outcome: Any, position: int, task: Task) -> bool:
    if isinstance(outcome, list):
        return math.fsum(map(abs, outcome)) <= MAX_MAGNITUDE
    if isinstance(outcome, float):
        return abs(outcome) <= MAX_MAGNITUDE
    if outcome is None:
        return position in task.failures or position in task.skipped
    return isinstance(outcome, dict) and isinstance(outcome.get("failed", outcome.get("unavailable")), str)


MAX_BATCH_SAMPLES = 64
MAX_BATCH_CHARS = 1 << 20
# How often the workers' health is looked at when nothing else happens.
CHECK_INTERVAL_S = 0.25
# How long samples wait before there are more workers to take them.
PATIENCE_S = 0.25
START_LIMIT_S = 120.0
# Deaths in a row that no sample is to blame for, before the pool gives up.
MAX_UNEXPLAINED_DEATHS = 3


class Dispatcher(threading.Thread):
    """Hands tasks to workers and results to ``finished``; replaces workers that die or exceed the limit.

    It starts every worker itself, since the kernel ties a worker's life to the thread that started it.
    ``started`` gets what each verifier reads when the first worker is ready, or the reason why they cannot start.
    ``take_counts`` tells what the scoring took (``judges.accounting``).
    ``finished`` gets lists of ``(sequence, RewardResult)``, or once, as the last item, an exception.
    """

    def __init__(
        self,
        selection: Selection,
        num_workers: int | None,
        timeout_s: float,
        failure_value: float,
        memory_limit_bytes: int,
        failure_log: FailureLog | None,
    ):
        super().__init__(name="mindrlhf-reward-dispatcher", daemon=True)
        self.started: Future[list[Reads]] = Future()
        self.finished: queue.SimpleQueue[list[tuple[int, RewardResult]] | BaseException] = queue.SimpleQueue()
        self._settings = WorkerSettings(
            verifiers=list(selection.verifiers),
            options=[selection.options_for(verifier) for verifier in selection.verifiers],
            timeout_s=timeout_s,
            memory_limit_bytes=memory_limit_bytes,
        )
        self._part_names = selection.names
        self._weights = list(selection.weights)
        self.max_workers = num_workers or len(os.sched_getaffinity(0))
        self._num_at_start = num_workers or 1
        self._waiting_since_s: float | None = None  # samples, without a pause
        self._timeout_s = timeout_s
        self._failure_value = failure_value
        self._failure_log = failure_log
        self._output = WorkerOutput("verifiers")
        self._incoming: deque[Task] = deque()
        self._workers: list[RewardWorker] = []
        self.remotes = RemoteNodes(self._wake)
        self._selector = selectors.DefaultSelector()
        self._wake_fd, self._waker_fd = os.pipe()
        self._wake_is_due = False
        self._is_stopping = False
        self._num_unexplained_deaths = 0
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()

    def add(self, tasks: Sequence[Task]) -> None:
        self._incoming.extend(tasks)
        self._wake()

    def stop(self) -> None:
        """Kill all workers and wait for the thread to end (from any other thread)."""
        self._is_stopping = True
        self._wake()
        self.join()

    def run(self) -> None:
        try:
            self._selector.register(self._wake_fd, selectors.EVENT_READ)
            for _ in range(self._num_at_start):
                self._start_worker()
            while not self._is_stopping:
                self._serve_once()
        except BaseException as error:
            if not self.started.done():
                self.started.set_exception(error)
            self.finished.put(error)
        finally:
            for worker in self._workers:
                worker.kill()
                worker.close()
            self.remotes.close()
            self._selector.close()
            if self._failure_log is not None:
                self._failure_log.close()

    def close_wake_pipe(self) -> None:
        """When no thread can call ``add`` or ``stop`` any more."""
        os.close(self._wake_fd)
        os.close(self._waker_fd)

    def _wake(self) -> None:
        if not self._wake_is_due:
            self._wake_is_due = True
            os.write(self._waker_fd, b"!")

    def _serve_once(self) -> None:
        for key, _ in self._selector.select(self._time_to_next_check_s()):
            worker = key.data
            if worker is None:
                os.read(self._wake_fd, 64)
                # Before the tasks are taken: one that is added from here on wakes again.
                self._wake_is_due = False
            elif key.fd == worker.responses_fd:
                self._receive(worker)
            else:
                self._send(worker)
        self._receive_remote()
        for worker in list(self._workers):
            self._check_health(worker)
        self._hand_out()
        self._start_more()

    def _start_more(self) -> None:
        """Double the workers where samples have waited for some time: that changes no result, so clocks may decide.

        Where other nodes take what there is, those wait that a worker holds beyond the one it works on.
        """
        now_s = time.monotonic()
        held = sum(max(0, len(worker.tasks) - 1) for worker in self._workers if self.remotes.present)
        num_waiting = len(self._incoming) + held
        if not num_waiting or not all(worker.is_ready for worker in self._workers):
            self._waiting_since_s = None
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if now_s - self._waiting_since_s >= PATIENCE_S:
            num_workers = len(self._workers)
            for _ in range(min(num_workers, self.max_workers - num_workers, num_waiting)):
                self._start_worker()
            self._waiting_since_s = None

    def _time_to_next_check_s(self) -> float:
        now_s = time.monotonic()
        limits = [CHECK_INTERVAL_S, self._timeout_s]
        for worker in self._workers:
            running = worker.clock.running()
            if running is not None:
                limits.append(max(0.0, running.started_at_s + self._timeout_s - now_s))
        return min(limits)

    def _start_worker(self) -> None:
        worker = RewardWorker(self._settings, self._output)
        self._workers.append(worker)
        self._selector.register(worker.responses_fd, selectors.EVENT_READ, worker)
        self._send(worker)

    def _send(self, worker: RewardWorker) -> None:
        worker.send()
        is_registered = worker.requests_fd in self._selector.get_map()
        if worker.has_unsent_bytes and not is_registered:
            self._selector.register(worker.requests_fd, selectors.EVENT_WRITE, worker)
        elif is_registered and not worker.has_unsent_bytes:
            self._selector.unregister(worker.requests_fd)

    def _hand_out(self) -> None:
        """Give idle workers their share of what is left (Polychronopoulos and Kuck, IEEE Trans. Computers, 1987).

        Large batches keep the cost per sample low; the shrinking ones at the end spread slow samples over all workers.
        """
        while self._incoming:
            first = self._incoming[0]
            share = math.ceil(len(self._incoming) / (self.max_workers + self.remotes.num_workers))
            batch_size = 1 if first.is_suspect else min(MAX_BATCH_SAMPLES, share)
            # A worker may hold one batch beyond the one it works on, so that it never waits for us.
            takers = [*self._workers, *(self.remotes.present if first.may_travel else ())]
            takers = [one for one in takers if one.is_ready and one.load < batch_size and one.suspect is None]
            if not takers:
                return
            taker = min(takers, key=lambda one: one.load)
            taker.give(self._take_batch(batch_size, first.may_travel))
            if isinstance(taker, RewardWorker):
                self._send(taker)

    def _take_batch(self, num_samples: int, may_travel: bool) -> list[Task]:
        batch = [self._incoming.popleft()]
        num_chars = _num_chars(batch[0])
        while self._incoming and len(batch) < num_samples and num_chars < MAX_BATCH_CHARS:
            if self._incoming[0].is_suspect or self._incoming[0].may_travel != may_travel:
                break
            batch.append(self._incoming.popleft())
            num_chars += _num_chars(batch[-1])
        return batch

    def _receive(self, worker: RewardWorker) -> None:
        for message in worker.receive():
            if worker.is_ready:
                finished = worker.take_finished(message)
                self._add_counts(worker.counts)
                if finished:
                    self._num_unexplained_deaths = 0
                self._publish([self._finish(task, outcomes) for task, outcomes in finished])
                if worker.is_broken:
                    return
            elif isinstance(message, dict) and "error" in message:
                raise UserError(message["error"])
            else:
                reads = [Reads(**values) for values in message["reads"]]
                worker.reads = self.remotes.reads = Reads.together(reads)
                if not self.started.done():
                    self.started.set_result(reads)

    def _receive_remote(self) -> None:
        finished, lost, counts = self.remotes.take_news()
        self._incoming.extendleft(reversed(lost))
        self._add_counts(counts)
        for task, result in finished:
            self._log(task.sample, result.failures, result.unscored)
        self._publish([(task.sequence, result) for task, result in finished])

    def take_counts(self) -> Counter[str]:
        """Return what the scoring has taken since this was last asked (from any thread)."""
        with self._counts_lock:
            taken, self._counts = self._counts, Counter()
        return taken

    def _add_counts(self, counts: Counter[str]) -> None:
        with self._counts_lock:
            self._counts.update(counts)
        counts.clear()

    def _publish(self, results: list[tuple[int, RewardResult]]) -> None:
        if results:
            self.finished.put(results)

    def _finish(self, task: Task, outcomes: Sequence[Any]) -> tuple[int, RewardResult]:
        parts, failures, steps, weighted, unscored = {}, {}, {}, [], ""
        for position, (name, weight, outcome) in enumerate(zip(self._part_names, self._weights, outcomes)):
            if position in task.skipped:
                continue
            if isinstance(outcome, list):
                steps[name] = outcome
                outcome = math.fsum(outcome)
            if outcome and isinstance(outcome, dict) and "unavailable" in outcome:
                unscored = unscored or f"{name}: {outcome['unavailable']}"
                continue
            if not isinstance(outcome, float):
                failures[name] = outcome["failed"] if outcome else task.failures[position]
                outcome = self._failure_value
            parts[name] = outcome
            weighted.append(weight * outcome)
        self._log(task.sample, failures, unscored)
        total = math.nan if unscored else math.fsum(weighted)
        return task.sequence, RewardResult(task.sample.index, parts, total, failures, steps, unscored)

    def _log(self, sample: RewardInput, failures: dict[str, str], unscored: str) -> None:
        if self._failure_log is not None:
            name, _, reason = unscored.partition(": ")
            self._failure_log.write(sample, failures | ({name: reason} if unscored else {}))

    def _check_health(self, worker: RewardWorker) -> None:
        if not worker.is_ready and time.monotonic() - worker.started_at_s > START_LIMIT_S:
            raise UserError(
                f"verifiers {', '.join(self._settings.verifiers)} took longer than {START_LIMIT_S:.0f} s to load: "
                "move slow work out of the top level of the verifier file"
            )
        has_ended = worker.has_hung_up or worker.has_exited()
        is_lost = worker.is_broken or worker.has_lost_tasks()
        if has_ended or is_lost or worker.overdue_call(self._timeout_s) is not None:
            self._replace(worker, has_ended, is_lost)

    def _replace(self, worker: RewardWorker, has_ended: bool, is_lost: bool) -> None:
        ending = worker.kill()
        self._receive(worker)
        if worker.is_broken:
            ending = PIPE_BROKEN
        elif is_lost:
            ending = "it answered no more"
        if not worker.is_ready:
            raise RunFailure(f"a reward worker ended while it started ({ending}): see its messages above")
        self._find_culprit(worker, ending, has_ended, is_lost or worker.is_broken)
        self._incoming.extendleft(reversed(worker.tasks.values()))
        for fd in (worker.requests_fd, worker.responses_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        worker.close()
        self._workers.remove(worker)
        self._start_worker()

    def _find_culprit(self, worker: RewardWorker, ending: str, has_ended: bool, is_lost: bool) -> None:
        """Blame a call for the end of its worker; where it may have been any since the last result, none."""
        # Read after death: only now is it certain which call was under way. A call that was overdue may
        # have returned just before the kill; then the next one is innocent.
        running = None if is_lost else worker.clock.running() if has_ended else worker.overdue_call(self._timeout_s)
        blamed = worker.tasks.get(running.sequence) if running is not None else None
        if blamed is not None and has_ended and ending == OUT_OF_MEMORY and not blamed.is_suspect:
            for task in worker.tasks.values():  # the machine may have chosen any process: once more, each alone
                task.is_suspect = True
        elif blamed is not None:
            self._num_unexplained_deaths = 0
            self._blame(worker, blamed, running.position, f"worker died: {ending}" if has_ended else "timeout")
        elif (has_ended or is_lost) and worker.suspect is not None:
            self._num_unexplained_deaths = 0
            reason = f"worker {'broken' if is_lost else 'died'}: {ending}"
            self._blame(worker, worker.suspect, worker.clock.last_position(), reason)
        elif worker.tasks:
            for task in worker.tasks.values():
                task.is_suspect = task.is_suspect or has_ended or is_lost
        elif has_ended or is_lost:
            self._num_unexplained_deaths += 1
            if self._num_unexplained_deaths >= MAX_UNEXPLAINED_DEATHS:
                raise RunFailure(
                    f"reward workers ended {MAX_UNEXPLAINED_DEATHS} times in a row without a sample to blame "
                    f"({ending}): see their messages above; is the machine out of memory?"
                )

    def _blame(self, worker: RewardWorker, task: Task, position: int, reason: str) -> None:
        open_positions = set(range(len(self._part_names))) - task.failures.keys() - set(task.skipped)
        if position not in open_positions:  # the last one called was another sample's
            position = min(open_positions)
        task.failures[position] = reason
        if len(task.failures) + len(task.skipped) == len(self._part_names):
            del worker.tasks[task.sequence]
            self._publish([self._finish(task, [None] * len(self._part_names))])


def _num_chars(task: Task) -> int:
    sample = task.sample
    num_chars = len(sample.completion) + len(sample.prompt) + sum(map(len, sample.completions))
    return num_chars + (len(repr(sample.extra)) if sample.extra else 0)
