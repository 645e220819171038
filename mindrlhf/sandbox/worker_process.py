"""The pool's side of a worker process that runs user code: its start, its pipes, its output and its end."""

import os
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mindrlhf.sandbox.pipes import MAX_RESPONSE_BYTES, BrokenPipeMessage, MessageReader, pack_message
from mindrlhf.sandbox.time_limit import CallClock, Running
from mindrlhf.sandbox.worker import PIPES_LOST_EXIT_CODE
from mindrlhf.system import timeline
from mindrlhf.system.child import Child, describe_ending, module_words
from mindrlhf.system.processes import thread_states

READ_SIZE_BYTES = 1 << 18
MAX_OUTPUT_BYTES = 10_000_000
PIPES_LOST = "it closed or replaced its worker's pipes"
PIPE_BROKEN = "it wrote to its worker's pipes"
# A worker that holds items, is in no call and says nothing for this long has lost them.
MAX_SILENCE_S = 30.0
_EXIT_INTERVAL_S, _EXIT_TIMEOUT_S = 0.01, 0.5
_OUTPUT_TIMEOUT_S = 1.0


class WorkerOutput:
    """Output of the workers of one pool, copied to this process's standard error up to ``MAX_OUTPUT_BYTES``."""

    def __init__(self, owner: str):
        self._owner = owner
        self._num_bytes_left = MAX_OUTPUT_BYTES
        self._lock = threading.Lock()

    def relay(self, fd: int) -> None:
        """Copy from a pipe until its last writer is gone, and close it."""
        with open(fd, "rb", buffering=0) as pipe:
            while chunk := pipe.read(READ_SIZE_BYTES):
                with self._lock:
                    self._copy(chunk)

    def _copy(self, chunk: bytes) -> None:
        if not self._num_bytes_left:
            return
        shown = chunk[: self._num_bytes_left]
        self._num_bytes_left -= len(shown)
        if not self._num_bytes_left:
            shown += f"\nmindrlhf: {self._owner} have printed {MAX_OUTPUT_BYTES} bytes; the rest is dropped\n".encode()
        try:
            while shown:
                shown = shown[os.write(2, shown) :]
        except OSError:  # a full disk, or nobody who reads
            self._num_bytes_left = 0


@dataclass(slots=True)
class Task:
    """An item on its way through a pool, and its steps that have ended a worker so far."""

    number: int
    steps: list[int]  # that are to be done
    item: Any  # JSON can hold it
    num_chars: int  # of it, about
    label: str  # in timelines
    failures: dict[int, str] = field(default_factory=dict)  # reason, by step
    is_suspect: bool = False  # it was in a worker that broke between two calls, and is from now on done alone

    @property
    def may_travel(self) -> bool:
        """Return whether another node may do it: what has failed here is tried again here."""
        return not self.is_suspect and not self.failures

    @property
    def open_steps(self) -> list[int]:
        return [step for step in self.steps if step not in self.failures] if self.failures else self.steps

    def outcomes(self, done: Sequence[Any] = ()) -> list[Any]:
        """Return the outcome of each step, from those of the open ones in order."""
        if not self.failures:
            return list(done)
        rest = iter(done)
        return [{"died": self.failures[step]} if step in self.failures else next(rest) for step in self.steps]


def batch_of(tasks: Sequence[Task]) -> list[list[Any]]:
    """Return what a worker, or another node, is told of some tasks."""
    return [[task.number, task.open_steps, task.item] for task in tasks]


class WorkerProcess:
    """A running worker and the tasks it holds. Nothing here blocks except ``kill``, which waits for the killed process.

    The worker is a fresh interpreter, never a fork: the parent has MindSpore's threads and locks. The kernel ends it
    with the thread that started it.
    """

    def __init__(self, settings: Any, output: WorkerOutput, name: str, python: str = ""):
        self._name = name
        self._ending: str | None = None  # how it ended, once it is killed
        clock_fd = os.memfd_create("mindrlhf-call-clock")
        their_requests_fd, self.requests_fd = os.pipe()
        self.responses_fd, their_responses_fd = os.pipe()
        output_fd, their_output_fd = os.pipe()
        theirs = (their_requests_fd, their_responses_fd, clock_fd)
        try:
            self.clock = CallClock(clock_fd)
            self.clock.stop()
            words = module_words("mindrlhf.sandbox.worker", *theirs, python=python)
            self._process = Child(words, output=their_output_fd, descriptors=theirs, mark=uuid.uuid4().hex)
        except BaseException:
            for fd in (self.requests_fd, self.responses_fd, output_fd):
                os.close(fd)
            raise
        finally:
            for fd in (*theirs, their_output_fd):
                os.close(fd)
        self._output = threading.Thread(target=output.relay, args=(output_fd,), name="worker-output", daemon=True)
        self._output.start()
        os.set_blocking(self.requests_fd, False)
        os.set_blocking(self.responses_fd, False)
        self.started_at_s = time.monotonic()
        self.has_hung_up = False
        self.is_broken = False  # what it sends is no message
        self._reader = MessageReader(MAX_RESPONSE_BYTES)
        self._unsent = memoryview(b"")
        self._queued = [pack_message(settings)]
        self._last_sign_s = self.started_at_s
        self.is_ready = False
        self.tasks: dict[int, Task] = {}
        self._busy = timeline.span("start", name, f"worker {self.pid}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_unsent_bytes(self) -> bool:
        return bool(self._unsent) or bool(self._queued)

    @property
    def load(self) -> float:
        return len(self.tasks)

    @property
    def suspect(self) -> Task | None:
        """The task it holds alone because that one may have broken a worker."""
        tasks = list(self.tasks.values())
        return tasks[0] if len(tasks) == 1 and tasks[0].is_suspect else None

    def give(self, tasks: Sequence[Task]) -> None:
        """Leave tasks for ``send``."""
        if not self.tasks:
            self._busy.end()
            self._busy = timeline.span(tasks[0].label, self._name, f"worker {self.pid}", samples=len(tasks))
        self.tasks |= {task.number: task for task in tasks}
        self._last_sign_s = time.monotonic()
        self._queued.append(pack_message(batch_of(tasks)))

    def take_finished(self, message: Any) -> list[tuple[int, list[Any]]]:
        """Return the numbers of the tasks that a message finishes, with their outcomes."""
        self._last_sign_s = time.monotonic()
        try:
            finished = finish(self.tasks, message)
        except ValueError:
            self.is_broken, finished = True, []
        if not self.tasks:
            self._busy.end()
        return finished

    def has_lost_tasks(self) -> bool:
        if not self.tasks or self.clock.running() is not None:
            self._last_sign_s = time.monotonic()
        if time.monotonic() - self._last_sign_s <= MAX_SILENCE_S:
            return False
        return "R" not in thread_states(self.pid)  # on a busy machine it may have waited for a processor

    def send(self) -> None:
        """Write as much as the pipe takes."""
        while self.has_unsent_bytes:
            if not self._unsent:
                self._unsent = memoryview(self._queued.pop(0))
            try:
                self._unsent = self._unsent[os.write(self.requests_fd, self._unsent) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._unsent = memoryview(b"")
                self._queued.clear()

    def receive(self) -> list[Any]:
        """Read what there is and return the complete messages.

        Notes in ``has_hung_up`` that no more will come, and in ``is_broken`` that none can be made out any more.
        """
        messages = []
        while not self.is_broken:
            try:
                chunk = os.read(self.responses_fd, READ_SIZE_BYTES)
            except BlockingIOError:
                break
            try:
                messages += self._reader.feed(chunk)
            except BrokenPipeMessage:
                self.is_broken = True
            self.has_hung_up = not chunk
            if len(chunk) < READ_SIZE_BYTES:
                break
        return messages

    def overdue_call(self, timeout_s: float) -> Running | None:
        """The call that has gone on for longer than the limit, if any."""
        running = self.clock.running()
        if running is None or time.monotonic() - running.started_at_s <= timeout_s:
            return None
        return running

    def has_exited(self) -> bool:
        return self._process.has_ended()

    def kill(self) -> str:
        """End the process and all it has started; say how it ended: ``exit code 3`` or ``signal SIGSEGV``."""
        if self._ending is None:
            self._busy.end()
            is_mute = self.has_hung_up and not self._exits_soon()
            code = self._process.kill()
            # Its last words belong before what is said of its end; another process may hold the pipe for ever.
            self._output.join(_OUTPUT_TIMEOUT_S)
            self._ending = PIPES_LOST if is_mute or code == PIPES_LOST_EXIT_CODE else describe_ending(code)
        return self._ending

    def close(self) -> None:
        os.close(self.requests_fd)
        os.close(self.responses_fd)

    def _exits_soon(self) -> bool:
        """Return True if the process ends by itself; its pipes close a moment before it has ended."""
        deadline_s = time.monotonic() + _EXIT_TIMEOUT_S
        while not self.has_exited():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_EXIT_INTERVAL_S)
        return True


def finish(tasks: dict[int, Task], message: Any) -> list[tuple[int, list[Any]]]:
    """Return the numbers and outcomes of tasks that a message finishes, and take these out of ``tasks``.

    Raises:
        ValueError: it is no such message.
    """
    try:
        for number, outcomes in message:
            if not isinstance(outcomes, list) or len(outcomes) != len(tasks[number].open_steps):
                raise ValueError("these are no outcomes")
    except (TypeError, KeyError) as error:
        raise ValueError(repr(error)) from None
    return [(number, tasks.pop(number).outcomes(outcomes)) for number, outcomes in message]
