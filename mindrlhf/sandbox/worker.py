"""The worker's side of a worker process: what surrounds the user's code that it calls.

A pool starts ``python -m MODULE REQUEST_FD RESPONSE_FD CLOCK_FD`` (see ``worker_process``); the module's
``main`` makes a ``PoolConnection``, takes its settings and then requests from it, and answers them. The time limit of
a call is enforced from outside, by killing this process.
"""

import resource
from collections.abc import Callable, Iterator, Sequence

# By name: user code may patch the modules.
from fcntl import F_DUPFD_CLOEXEC, F_GETPIPE_SZ, fcntl
from os import _exit, close, getpid, read, write
from typing import Any, TypeVar

from mindrlhf.sandbox import time_limit
from mindrlhf.sandbox.pipes import MAX_REQUEST_BYTES, MessageReader, pack_message
from mindrlhf.system.processes import adopt_orphans, end_with_starter

# What ``worker_process`` takes for "closed the pipes".
PIPES_LOST_EXIT_CODE = 87

_READ_SIZE_BYTES = 1 << 18
_HIGH_FD = 900  # below the usual limit of 1,024 descriptors

Result = TypeVar("Result")


class PoolConnection:
    """This process's end of the pipes, and the clock by which the pool sees which call is under way.

    User code never finds the pipes as standard input or output, nor do the programs that it starts inherit them. It
    can still damage them; ``call`` notices, and ends the process while the call counts as under way, so that the pool
    knows whom to blame.

    Args:
        arguments: those of the command line.
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
        """Yield the pool's messages until it closes its end."""
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

    def call(self, sequence: int, position: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that calls user code and raises nothing; end the process if that damaged the pipes."""
        self._clock.begin(sequence, position)
        result = function(*arguments)
        self.check()
        self._clock.stop()
        return result

    def check(self) -> None:
        """End this process if it is a fork that came back from user code, or if that closed or replaced the pipes."""
        if getpid() != self._pid:
            _exit(0)
        try:  # whether they are open, and pipes
            fcntl(self._request_fd, F_GETPIPE_SZ)
            fcntl(self._response_fd, F_GETPIPE_SZ)
        except OSError:
            _exit(PIPES_LOST_EXIT_CODE)


def _moved_out_of_reach(fd: int) -> int:
    lowest = min(_HIGH_FD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    moved = fcntl(fd, F_DUPFD_CLOEXEC, lowest)
    close(fd)
    return moved
