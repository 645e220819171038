"""The pool's side of one worker: its process, its pipes, and the samples it holds."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mindrlhf.rewards.types import RewardInput
from mindrlhf.rewards.worker import WorkerSettings
from mindrlhf.sandbox.time_limit import CallClock, Running
from mindrlhf.system.processes import kill_marked, kill_tree

READ_SIZE_BYTES = 1 << 18
# Set for the worker and inherited by all it starts, so that what survives a worker's own death can be found.
MARKER = "MINDRLHF_REWARD_WORKER"


@dataclass(slots=True)
class Task:
    """A sample on its way through the pool, and the verifiers that have failed on it so far."""

    sequence: int
    sample: RewardInput
    skipped: list[int] = field(default_factory=list)  # positions of the verifiers that do not apply
    failures: dict[int, str] = field(default_factory=dict)  # reason, by position of the verifier


class WorkerProcess:
    """A running worker. Nothing here blocks except ``kill``, which waits for the killed process.

    The worker is a fresh interpreter, never a fork: the parent has MindSpore's threads and locks.
    """

    def __init__(self, settings: WorkerSettings):
        clock_fd = os.memfd_create("mindrlhf-reward-clock")
        self._mark = uuid.uuid4().hex
        try:
            self.clock = CallClock(clock_fd)
            self.clock.stop()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mindrlhf.rewards.worker", str(clock_fd), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(clock_fd,),
                env={**os.environ, MARKER: self._mark},
                start_new_session=True,  # so that an interrupt from the keyboard does not reach it
            )
        finally:
            os.close(clock_fd)
        self.requests_fd = self._process.stdin.fileno()
        self.responses_fd = self._process.stdout.fileno()
        os.set_blocking(self.requests_fd, False)
        os.set_blocking(self.responses_fd, False)
        self.started_at_s = time.monotonic()
        self.context_keywords: list[str] | None = None  # known once the worker is ready
        self.tasks: dict[int, Task] = {}
        self.has_hung_up = False
        self._unsent = memoryview(b"")
        self._queued: list[bytes] = []
        self._received: list[bytes] = []
        self._queue(asdict(settings))

    @property
    def is_ready(self) -> bool:
        return self.context_keywords is not None

    @property
    def has_unsent_bytes(self) -> bool:
        return bool(self._unsent) or bool(self._queued)

    def give(self, tasks: Sequence[Task]) -> None:
        """Send one batch of samples."""
        keywords = self.context_keywords
        messages = []
        for task in tasks:
            sample = task.sample
            self.tasks[task.sequence] = task
            context = [getattr(sample, keyword) for keyword in keywords]
            failed = list(task.failures)
            messages.append([task.sequence, failed, task.skipped, sample.completion, sample.answer, *context])
        self._queue(messages)

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
        """Read what there is and return the complete messages; notes in ``has_hung_up`` that no more will come."""
        messages = []
        while True:
            try:
                chunk = os.read(self.responses_fd, READ_SIZE_BYTES)
            except BlockingIOError:
                return messages
            if not chunk:
                self.has_hung_up = True
                return messages
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                messages.append(json.loads(b"".join([*self._received, line])))
                self._received.clear()
            if rest:
                self._received.append(rest)
            if len(chunk) < READ_SIZE_BYTES:
                return messages

    def overdue_call(self, timeout_s: float) -> Running | None:
        """The call that has gone on for longer than the limit, if any."""
        running = self.clock.running()
        if running is None or time.monotonic() - running.started_at_s <= timeout_s:
            return None
        return running

    def has_exited(self) -> bool:
        """Whether the process has ended. It is not reaped yet, so its number is still its own."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # someone else has reaped it
            return True

    def kill(self) -> str:
        """End the process and all it has started; say how it ended: ``exit code 3`` or ``signal SIGSEGV``."""
        if self._process.returncode is None:  # once it is reaped, its number may belong to others
            kill_tree(self._process.pid)
        code = self._process.wait()
        kill_marked(MARKER, self._mark)
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def close(self) -> None:
        """Close the pipes of a killed process."""
        self._process.stdin.close()
        self._process.stdout.close()

    def _queue(self, message: Any) -> None:
        self._queued.append(json.dumps(message).encode() + b"\n")
