"""Worker processes that run tool calls, each under a time limit."""

import json
import math
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system.processes import kill_tree
from mindrlhf.tools.calls import ToolAnswer, ToolCall
from mindrlhf.tools.registry import check

if TYPE_CHECKING:
    from mindrlhf.config.sections import ToolSection

START_TIMEOUT_S = 120.0
READ_SIZE_BYTES = 1 << 16
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
        self._workers = [_Worker(settings) for _ in range(num_workers)]
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
            worker.close()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:  # one may have been on the way up
            worker.close()

    def _answer(self, call: ToolCall) -> ToolAnswer:
        worker = self._idle.get()
        try:
            worker.start()
            text, is_failure = worker.ask([call.name, call.arguments], self._timeout_s)
            return ToolAnswer(text.encode(errors="replace").decode(), is_failure)
        except WorkerDied as death:
            worker.kill()
            return ToolAnswer(f"Error: {call.name[:80]}: {death}", is_failure=True)
        finally:
            self._idle.put(worker)


class _Worker:
    """One worker process, started when it is needed."""

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings
        self._process: subprocess.Popen | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process if there is none.

        Raises:
            UserError: the tools do not load.
            RunFailure: the process does not come up.
        """
        if self._process is not None or self._is_closed:
            return
        # A fresh interpreter, never a fork: this process has MindSpore's threads and locks.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mindrlhf.tools.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # so that an interrupt from the keyboard does not reach it
        )
        try:
            greeting = self.ask(self._settings, START_TIMEOUT_S)
        except WorkerDied as death:
            self.kill()
            raise RunFailure(f"a tool worker did not start: {death}") from death
        if "error" in greeting:
            self.kill()
            raise UserError(greeting["error"])

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Send one message and return the answer."""
        process, deadline_s = self._process, time.monotonic() + timeout_s
        if process is None:
            raise WorkerDied("the tools are shut down")
        received = bytearray()
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            while not received.endswith(b"\n"):
                if not select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                    raise WorkerDied(f"no answer within {timeout_s:g} s")
                chunk = os.read(process.stdout.fileno(), READ_SIZE_BYTES)
                if not chunk:
                    raise WorkerDied("the tool's process died")
                received += chunk
        except (OSError, ValueError) as error:  # the pipes of a killed worker are broken, or closed
            raise WorkerDied("the tool's process died") from error
        return json.loads(received)

    def kill(self) -> None:
        """End the process and all it has started."""
        process, self._process = self._process, None
        if process is not None:
            kill_tree(process.pid)
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def close(self) -> None:
        """Kill the process for good."""
        self._is_closed = True
        self.kill()
