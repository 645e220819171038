"""Worker processes that run tool calls, each under a time limit."""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mindrlhf.sandbox.pool import Results, WorkerPool
from mindrlhf.tools.calls import ToolAnswer, ToolCall
from mindrlhf.tools.registry import check

if TYPE_CHECKING:
    from mindrlhf.config.reward import ToolSection

DEFAULT_MEMORY_LIMIT_MIB = 1024


class ToolPool:
    """Runs tool calls in ``num_workers`` processes; one that hangs or dies costs its own call, which is answered with
    an error. For use from one thread, best as a context manager.

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
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._running: dict[int, tuple[str, Future[ToolAnswer]]] = {}
        self._pool = WorkerPool(
            "tools",
            "mindrlhf.tools.worker:setup",
            list(tools),
            self._take,
            num_workers=num_workers,
            timeout_s=timeout_s,
            memory_limit_bytes=memory_limit_mib << 20,
            max_batch=1,
        )

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
        number, future, name = next(self._numbers), Future(), call.name[:80]
        future.set_running_or_notify_cancel()
        self._running[number] = name, future
        item = [call.name, call.arguments, dict(call.extra), call.is_text]
        self._pool.submit([(number, [0], item, 0)], name or "a call")
        return future

    def close(self) -> None:
        """Kill the workers; calls that have no answer yet get an error. Calling it again does nothing."""
        self._pool.close()
        self._take([(number, [{"died": "the tools are shut down"}]) for number in list(self._running)])

    def _take(self, results: Results | BaseException) -> None:
        if isinstance(results, BaseException):
            for _, future in list(self._running.values()):
                future.set_exception(results)
            self._running.clear()
            return
        for number, (outcome,) in results:
            name, future = self._running.pop(number)
            match outcome:
                case [str(text), bool(is_failure)]:
                    answer = ToolAnswer(text.encode(errors="replace").decode(), is_failure)
                case {"died": "timeout"}:
                    answer = ToolAnswer(f"Error: {name}: no answer within {self._timeout_s:g} s", is_failure=True)
                case {"died": str(reason)}:
                    answer = ToolAnswer(f"Error: {name}: {reason}", is_failure=True)
                case _:
                    answer = ToolAnswer(f"Error: {name}: no answer", is_failure=True)
            future.set_result(answer)
