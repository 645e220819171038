"""One worker of a ``pool.WorkerPool``: ``main``, with REQUEST_FD RESPONSE_FD CLOCK_FD.

In: first ``{"setup", "settings", "timeout_s", "memory_limit_bytes"}``, then ``[[number, [step, ...], item], ...]``.
Out: first ``{"ready": value}`` or ``{"error": message}``, then ``[[number, [outcome of each step, ...]], ...]``.

``setup`` is ``module:function``. The function takes the settings and returns the value that is told once, and
``handle(step, item)``, which calls user code, raises nothing and returns an outcome that JSON can hold. The time limit
of a step is enforced from outside, by killing this process.
"""

import importlib
import resource
import sys
from collections.abc import Callable, Iterator, Sequence

# By name: user code may patch the modules.
from fcntl import F_DUPFD_CLOEXEC, F_GETPIPE_SZ, fcntl
from os import _exit, close, getpid, read, write
from time import monotonic
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.sandbox import time_limit
from mindrlhf.sandbox.pipes import MAX_REQUEST_BYTES, MessageReader, pack_message
from mindrlhf.system.processes import adopt_orphans, end_with_starter

# What ``worker_process`` takes for "closed the pipes".
PIPES_LOST_EXIT_CODE = 87
# Between two steps results older than this are sent on, so that they do not wait for the rest of a slow batch, and
# little has to be done again when the worker is killed.
FLUSH_INTERVAL_S = 0.005

_READ_SIZE_BYTES = 1 << 18
_HIGH_FD = 900  # below the usual limit of 1,024 descriptors


class PoolConnection:
    """This process's end of the pipes, and the clock by which the pool sees which call is under way.

    User code never finds the pipes as standard input or output, nor do the programs that it starts inherit them. It
    can still damage them; ``call`` notices, and ends the process while the call counts as under way, so that the pool
    knows whom to blame.
    """

    def __init__(self, arguments: Sequence[str]):
        request_fd, response_fd, clock_fd = map(int, arguments)
        end_with_starter()
        adopt_orphans()
        self._pid = getpid()
        self._request_fd, self._response_fd = _moved_out_of_reach(request_fd), _moved_out_of_reach(response_fd)
        self._reader = MessageReader(MAX_REQUEST_BYTES)
        self._clock = time_limit.CallClock(clock_fd)
        close(clock_fd)

    def receive(self) -> Iterator[Any]:
        while chunk := read(self._request_fd, _READ_SIZE_BYTES):
            yield from self._reader.feed(chunk)

    def send(self, message: Any) -> None:
        """Send one message, whatever the pipe takes at a time."""
        unsent = memoryview(pack_message(message))
        while unsent:
            unsent = unsent[write(self._response_fd, unsent) :]

    def limit(self, memory_limit_bytes: int, timeout_s: float) -> None:
        """Limit what this process, and each that it starts, may allocate (0: no limit; mapped libraries do not count),
        and tell ``time_limit`` how long a call may take."""
        if memory_limit_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
        time_limit.install(self._clock, timeout_s)

    def call(self, number: int, step: int, handle: Callable[[int, Any], Any], item: Any) -> Any:
        """Do one step of an item; end the process if that damaged the pipes."""
        self._clock.begin(number, step)
        outcome = handle(step, item)
        self.check()
        self._clock.stop()
        return outcome

    def check(self) -> None:
        """End this process if it is a fork that came back from user code, or if that closed or replaced the pipes."""
        if getpid() != self._pid:
            _exit(0)
        try:  # whether they are open, and pipes
            fcntl(self._request_fd, F_GETPIPE_SZ)
            fcntl(self._response_fd, F_GETPIPE_SZ)
        except OSError:
            _exit(PIPES_LOST_EXIT_CODE)


def main() -> int:
    """Serve until the pool closes its end of the pipe."""
    pool = PoolConnection(sys.argv[1:])
    requests = pool.receive()
    settings = next(requests)
    pool.limit(settings["memory_limit_bytes"], settings["timeout_s"])
    module, _, name = settings["setup"].partition(":")
    try:
        ready, handle = getattr(importlib.import_module(module), name)(settings["settings"])
    except UserError as error:
        pool.send({"error": str(error)})
        return 1
    pool.check()
    pool.send({"ready": ready})
    for batch in requests:
        _serve(pool, handle, batch)
    return 0


def _serve(pool: PoolConnection, handle: Callable[[int, Any], Any], batch: Sequence[Any]) -> None:
    finished: list[list[Any]] = []
    flushed_at_s = monotonic()
    for number, steps, item in batch:
        outcomes = []
        for step in steps:
            if finished and monotonic() - flushed_at_s > FLUSH_INTERVAL_S:
                pool.send(finished)
                finished, flushed_at_s = [], monotonic()
            outcomes.append(pool.call(number, step, handle, item))
        finished.append([number, outcomes])
    pool.send(finished)


def _moved_out_of_reach(fd: int) -> int:
    lowest = min(_HIGH_FD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    moved = fcntl(fd, F_DUPFD_CLOEXEC, lowest)
    close(fd)
    return moved
