"""A pool of worker processes that run user code, each step of it under a time limit.

Verifiers and tools are its users. An item that hangs, ends its process or takes its memory costs itself alone: its
worker is killed with all it has started, and replaced; the other items that the worker held are done again.
"""

import contextlib
import math
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.sandbox.remote_workers import RemoteWorkers
from mindrlhf.sandbox.worker_process import PIPE_BROKEN, Task, WorkerOutput, WorkerProcess
from mindrlhf.system.handshake import SignedConnection

MAX_BATCH_ITEMS = 64
MAX_BATCH_CHARS = 1 << 20
# How often the workers' health is looked at when nothing else happens.
CHECK_INTERVAL_S = 0.25
# How long items wait before there are more workers to take them.
PATIENCE_S = 0.25
START_LIMIT_S = 120.0
# Deaths in a row that no item is to blame for, before the pool gives up.
MAX_UNEXPLAINED_DEATHS = 3
OUT_OF_MEMORY = "signal SIGKILL"  # nobody here sends it to a worker that has not been given up

# Number of an item, and the outcome of each of its steps: what ``handle`` returned, or {"died": reason}.
Results = list[tuple[int, list[Any]]]


class WorkerPool:
    """Hands items to workers and their results to ``deliver``; replaces workers that die or exceed the limit.

    All is done by one thread, since the kernel ties a worker's life to the thread that started it.

    Args:
        name: of what runs, for messages: "verifiers".
        setup: ``module:function`` that a worker begins with; see ``worker``.
        settings: its argument, anything JSON can hold.
        deliver: called by that thread with results, or once, as the last, with the exception that ends the pool.
        num_workers: None means one at first and, while items wait, more, up to one for each core of this process.
        timeout_s: longest time that one step of an item may take.
        memory_limit_bytes: of each worker and what it starts; 0 means none.
        max_batch: items that a worker is given at a time. With 1 no item is ever begun twice.
        python: another interpreter for the workers.

    Raises:
        UserError: counts or limits that make no sense, or what ``setup`` raises.
        RunFailure: the workers cannot be started.
    """

    def __init__(
        self,
        name: str,
        setup: str,
        settings: Any,
        deliver: Callable[[Results | BaseException], None],
        *,
        num_workers: int | None,
        timeout_s: float,
        memory_limit_bytes: int,
        max_batch: int = MAX_BATCH_ITEMS,
        python: str = "",
    ):
        if num_workers is not None and num_workers < 1:
            raise UserError(f"{num_workers} processes for {name}: at least 1 is needed")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise UserError(f"the time limit of {name} is {timeout_s} s: it must be positive and finite")
        self._name, self._python = name, python
        self._first_message = {
            "setup": setup,
            "settings": settings,
            "timeout_s": timeout_s,
            "memory_limit_bytes": memory_limit_bytes,
        }
        self._deliver = deliver
        self.max_workers = num_workers or len(os.sched_getaffinity(0))
        self._num_at_start = num_workers or 1
        self._timeout_s = timeout_s
        self._max_batch = max_batch
        self._waiting_since_s: float | None = None  # items, without a pause
        self._output = WorkerOutput(name)
        self._incoming: deque[Task] = deque()
        self._workers: list[WorkerProcess] = []
        self._remotes: list[RemoteWorkers] = []
        self._news: deque[tuple[RemoteWorkers, dict[str, Any]]] = deque()  # of remote workers
        self._selector = selectors.DefaultSelector()
        self._wake_fd, self._waker_fd = os.pipe()
        self._waking = threading.Lock()  # nobody may be woken once this is closed
        self._wake_is_due = self._is_closed = False
        self._num_unexplained_deaths = 0
        self._endings: set[str] = set()  # that were said: each once
        self._failure: BaseException | None = None
        self._started: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, name=f"mindrlhf-{name}", daemon=True)
        self._thread.start()
        try:
            self.ready = self._started.result()  # what ``setup`` returned first
        except BaseException:
            self.close()
            raise

    def submit(self, items: Iterable[tuple[int, list[int], Any, int]], label: str) -> None:
        """Queue items: their numbers, steps, what the worker gets, and about how many characters that has. ``label`` is
        their name in timelines.

        Raises what has ended the pool.
        """
        if self._failure is not None:
            raise self._failure
        self._incoming.extend(Task(*item, label, is_suspect=self._max_batch == 1) for item in items)
        self._wake()

    def admit(self, connection: SignedConnection, node: str) -> None:
        """Have the workers of another node take part, once they are ready; see :class:`RemoteWorkers`."""
        remote = RemoteWorkers(connection, f"the {self._name} of {node}")
        self._remotes.append(remote)  # before the connection can be lost: nobody else would be told
        remote.start(self._hear)
        self._wake()

    def close(self) -> None:
        """Kill all workers and wait for the thread to end (from any other thread). Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        self._thread.join()
        with self._waking:
            os.close(self._wake_fd)
            os.close(self._waker_fd)
            self._waker_fd = -1

    def _run(self) -> None:
        try:
            self._selector.register(self._wake_fd, selectors.EVENT_READ)
            for _ in range(self._num_at_start):
                self._start_worker()
            while not self._is_closed:
                self._serve_once()
        except BaseException as error:
            self._failure = error
            if not self._started.done():
                self._started.set_exception(error)
            self._deliver(error)
        finally:
            for worker in self._workers:
                worker.kill()
                worker.close()
            for remote in self._remotes:
                remote.close()
            self._selector.close()

    def _wake(self) -> None:
        with self._waking:
            if not self._wake_is_due and self._waker_fd >= 0:
                self._wake_is_due = True
                os.write(self._waker_fd, b"!")

    def _serve_once(self) -> None:
        for key, _ in self._selector.select(self._time_to_next_check_s()):
            worker = key.data
            if worker is None:
                os.read(self._wake_fd, 64)
                # Before the items are taken: one that is added from here on wakes again.
                self._wake_is_due = False
            elif key.fd == worker.responses_fd:
                self._receive(worker)
            else:
                self._send(worker)
        while self._news:
            self._receive_remote(*self._news.popleft())
        for worker in list(self._workers):
            self._check_health(worker)
        self._hand_out()
        self._start_more()

    def _start_more(self) -> None:
        """Double the workers where items have waited for some time: that changes no result, so clocks may decide.

        Where other nodes take what there is, those wait that a worker holds beyond the one it works on.
        """
        now_s = time.monotonic()
        held = sum(max(0, len(worker.tasks) - 1) for worker in self._workers if self._remotes)
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
        worker = WorkerProcess(self._first_message, self._output, self._name, self._python)
        self._workers.append(worker)
        self._selector.register(worker.responses_fd, selectors.EVENT_READ, worker)
        self._send(worker)

    def _send(self, worker: WorkerProcess) -> None:
        worker.send()
        is_registered = worker.requests_fd in self._selector.get_map()
        if worker.has_unsent_bytes and not is_registered:
            self._selector.register(worker.requests_fd, selectors.EVENT_WRITE, worker)
        elif is_registered and not worker.has_unsent_bytes:
            self._selector.unregister(worker.requests_fd)

    def _hand_out(self) -> None:
        """Give idle workers their share of what is left (Polychronopoulos and Kuck, IEEE Trans. Computers, 1987).

        Large batches keep the cost per item low; the shrinking ones at the end spread slow items over all workers.
        """
        while self._incoming:
            first = self._incoming[0]
            num_workers = self.max_workers + sum(remote.num_workers for remote in self._remotes)
            share = math.ceil(len(self._incoming) / num_workers)
            batch_size = 1 if first.is_suspect else min(self._max_batch, share)
            # A worker may hold one batch beyond the one it works on, so that it never waits for us.
            takers = [*self._workers, *(self._remotes if first.may_travel else ())]
            takers = [taker for taker in takers if taker.is_ready and taker.load < batch_size and taker.suspect is None]
            if not takers:
                return
            taker = min(takers, key=lambda taker: taker.load)
            taker.give(self._take_batch(batch_size, first.may_travel))
            if isinstance(taker, WorkerProcess):
                self._send(taker)

    def _take_batch(self, num_items: int, may_travel: bool) -> list[Task]:
        batch = [self._incoming.popleft()]
        num_chars = batch[0].num_chars
        while self._incoming and len(batch) < num_items and num_chars < MAX_BATCH_CHARS:
            if self._incoming[0].is_suspect or self._incoming[0].may_travel != may_travel:
                break
            batch.append(self._incoming.popleft())
            num_chars += batch[-1].num_chars
        return batch

    def _receive(self, worker: WorkerProcess) -> None:
        for message in worker.receive():
            if worker.is_ready:
                if results := worker.take_finished(message):
                    self._num_unexplained_deaths = 0
                    self._deliver(results)
                if worker.is_broken:
                    return
            elif isinstance(message, dict) and "error" in message:
                raise UserError(message["error"])
            else:
                worker.is_ready = True
                if not self._started.done():
                    self._started.set_result(message["ready"])

    def _hear(self, remote: RemoteWorkers, message: dict[str, Any]) -> None:
        self._news.append((remote, message))
        self._wake()

    def _receive_remote(self, remote: RemoteWorkers, message: dict[str, Any]) -> None:
        if remote not in self._remotes:
            return
        results, lost = remote.take_finished(message)
        if lost is not None:
            self._remotes.remove(remote)
            self._incoming.extendleft(reversed(lost))
        if results:
            self._deliver(results)

    def _check_health(self, worker: WorkerProcess) -> None:
        if not worker.is_ready and time.monotonic() - worker.started_at_s > START_LIMIT_S:
            raise UserError(
                f"{self._name} took longer than {START_LIMIT_S:.0f} s to load: "
                "move slow work out of the top level of their files"
            )
        has_ended = worker.has_hung_up or worker.has_exited()
        is_lost = worker.is_broken or worker.has_lost_tasks()
        if has_ended or is_lost or worker.overdue_call(self._timeout_s) is not None:
            self._replace(worker, has_ended, is_lost)

    def _replace(self, worker: WorkerProcess, has_ended: bool, is_lost: bool) -> None:
        ending = worker.kill()
        self._receive(worker)
        if worker.is_broken:
            ending = PIPE_BROKEN
        elif is_lost:
            ending = "it answered no more"
        if has_ended and ending not in self._endings:
            self._endings.add(ending)
            line = f"mindrlhf: a process of {self._name} has ended ({ending}), and another takes its place"
            print(line, file=sys.stderr, flush=True)
        if not worker.is_ready:
            raise RunFailure(f"a process of {self._name} ended while it started ({ending}): see its messages above")
        self._find_culprit(worker, ending, has_ended, is_lost or worker.is_broken)
        self._incoming.extendleft(reversed(worker.tasks.values()))
        for fd in (worker.requests_fd, worker.responses_fd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        worker.close()
        self._workers.remove(worker)
        self._start_worker()

    def _find_culprit(self, worker: WorkerProcess, ending: str, has_ended: bool, is_lost: bool) -> None:
        """Blame a call for the end of its worker; where it may have been any since the last result, none."""
        # Read after death: only now is it certain which call was under way. A call that was overdue may
        # have returned just before the kill; then the next one is innocent.
        running = None if is_lost else worker.clock.running() if has_ended else worker.overdue_call(self._timeout_s)
        blamed = worker.tasks.get(running.sequence) if running is not None else None
        if blamed is not None and has_ended and ending == OUT_OF_MEMORY and not blamed.is_suspect:
            for task in worker.tasks.values():  # the machine may have chosen any process: once more, each alone
                task.is_suspect = True
        elif blamed is not None:
            self._blame(worker, blamed, running.position, f"worker died: {ending}" if has_ended else "timeout")
        elif (has_ended or is_lost) and worker.suspect is not None:
            self._blame(worker, worker.suspect, worker.clock.last_position(), f"worker died: {ending}")
        elif worker.tasks:
            for task in worker.tasks.values():
                task.is_suspect = task.is_suspect or has_ended or is_lost
        elif has_ended or is_lost:
            self._num_unexplained_deaths += 1
            if self._num_unexplained_deaths >= MAX_UNEXPLAINED_DEATHS:
                raise RunFailure(
                    f"processes of {self._name} ended {MAX_UNEXPLAINED_DEATHS} times in a row without an item to blame "
                    f"({ending}): see their messages above; is the machine out of memory?"
                )

    def _blame(self, worker: WorkerProcess, task: Task, step: int, reason: str) -> None:
        self._num_unexplained_deaths = 0
        if step not in task.open_steps:  # the last one called was another item's
            step = task.open_steps[0]
        task.failures[step] = reason
        if not task.open_steps:
            del worker.tasks[task.number]
            self._deliver([(task.number, task.outcomes())])
