"""Worker processes that run tool calls, each under a time limit."""

import math
import queue
import select
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.sandbox.worker_process import PIPE_BROKEN, PIPES_LOST, WorkerOutput, WorkerProcess
from mindrlhf.system import timeline
from mindrlhf.tools.calls import ToolAnswer, ToolCall
from mindrlhf.tools.registry import check

if TYPE_CHECKING:
    from mindrlhf.config.reward import ToolSection

START_TIMEOUT_S = 120.0
CHECK_INTERVAL_S = 0.25
DEFAULT_MEMORY_LIMIT_MIB = 1024


class WorkerDied(Exception):
    """The worker ended, or did not answer in time; ``str`` says which."""


class ToolPool:
    """Runs tool calls in ``num_workers`` processes; a worker that hangs or dies is killed with all it started.

    Its call is answered with an error, and the next call gets a new worker. For use from one thread, best as a
    context manager.

    Raises:
        UserError: unknown tools, a file that does not load, counts or limits that make no sense.
        RunFailure: the workers cannot be started.
    """

    def __init__(
        self,
        tools: Sequence[str],
        num_workers: int = 1,
        timeout_s: float = 5.0,
        memory_limit_mib: int = DEFAULT_MEMORY_LIMIT_MIB,
    ):
        check(tools)
        if num_workers < 1:
            raise UserError(f"{num_workers} tool workers: at least 1 is needed")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise UserError(f"the time limit of tools is {timeout_s} s: it must be positive and finite")
        self._timeout_s = timeout_s
        settings = {"tools": list(tools), "timeout_s": timeout_s, "memory_limit_bytes": memory_limit_mib << 20}
        output = WorkerOutput("tools")
        self._workers = [_Worker(settings, output) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # The kernel ends a worker with the thread that started it, and these live as long as the pool.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="tools")
        for worker in self._workers:
            self._idle.put(worker)
        try:
            # Here, so that a user's file that does not load is found before the run begins.
            self._threads.submit(self._workers[0].start).result()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, tools: "ToolSection") -> "ToolPool":
        """Start the pool that a config's section describes."""
        return cls(tools.names, tools.num_workers, tools.timeout_s, tools.memory_limit_mib)

    def __enter__(self) -> "ToolPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, call: ToolCall) -> "Future[ToolAnswer]":
        """Queue one call and return at once."""
        return self._threads.submit(self._answer, call)

    def close(self) -> None:
        """Kill the workers; calls that have not begun are cancelled. Calling it again does nothing."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def _answer(self, call: ToolCall) -> ToolAnswer:
        worker = self._idle.get()
        try:
            worker.start()
            with timeline.span(call.name[:80] or "a call", "tools", f"worker {self._workers.index(worker) + 1}"):
                return worker.ask(call, self._timeout_s)
        except WorkerDied as death:
            worker.kill()
            return ToolAnswer(f"Error: {call.name[:80]}: {death}", is_failure=True)
        finally:
            self._idle.put(worker)


class _Worker:
    """One worker process, started when it is needed."""

    def __init__(self, settings: dict[str, Any], output: WorkerOutput):
        self._settings = settings
        self._output = output
        self._process: WorkerProcess | None = None
        self._num_calls = 0
        self._is_closed = False

    def start(self) -> None:
        """Start the process if there is none.

        Raises:
            UserError: the tools do not load.
            RunFailure: the process does not come up.
        """
        if self._process is not None or self._is_closed:
            return
        self._process = WorkerProcess("mindrlhf.tools.worker", self._settings, self._output)
        try:
            greeting = self._receive(START_TIMEOUT_S)
        except WorkerDied as death:
            self.kill()
            raise RunFailure(f"a tool worker did not start: {death}") from death
        if "error" in greeting:
            self.kill()
            raise UserError(greeting["error"])

    def ask(self, call: ToolCall, timeout_s: float) -> ToolAnswer:
        """Run one call."""
        if self._process is None:
            raise WorkerDied("the tools are shut down")
        self._num_calls += 1
        self._process.queue([self._num_calls, call.name, call.arguments, dict(call.extra), call.is_text])
        match self._receive(timeout_s):
            case [self._num_calls, str(text), bool(is_failure)]:
                return ToolAnswer(text.encode(errors="replace").decode(), is_failure)
        raise WorkerDied(PIPE_BROKEN)

    def _receive(self, timeout_s: float) -> Any:
        """Send what is queued and return the answer."""
        process, deadline_s = self._process, time.monotonic() + timeout_s
        while True:
            has_ended = self._is_closed or process.has_exited()
            if messages := process.receive():
                break
            if process.is_broken:
                raise WorkerDied(PIPE_BROKEN)
            if has_ended or process.has_hung_up:
                raise WorkerDied(PIPES_LOST if process.kill() == PIPES_LOST else "the tool's process died")
            if time.monotonic() >= deadline_s:
                raise WorkerDied(f"no answer within {timeout_s:g} s")
            process.send()
            unsent = [process.requests_fd] if process.has_unsent_bytes else []
            # A process that the tool has forked may keep the pipe open when the worker has ended.
            wait_s = min(CHECK_INTERVAL_S, max(0.0, deadline_s - time.monotonic()))
            select.select([process.responses_fd], unsent, [], wait_s)
        if len(messages) > 1 or process.is_broken:
            raise WorkerDied(PIPE_BROKEN)
        return messages[0]

    def kill(self) -> None:
        """End the process and all it has started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.close()

    def stop(self) -> None:
        """Let there be no process any more; the call that runs, in another thread, ends with an error."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
