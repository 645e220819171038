"""Checkpoints on request: SIGUSR1 asks rank 0 for one, SIGTERM for one and the end of the run."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from mindrlhf.system.processes import has_launcher


class StopRequested(BaseException):
    """SIGTERM came while nothing was going on that must be finished.

    Like KeyboardInterrupt no ``Exception``: it must not be taken for the failure of whatever it interrupts.
    """


class SaveRequests:
    """Requests by signals since ``listen``.

    Attributes:
        save: a checkpoint is wanted at the end of the step; whoever writes it sets this back.
        stop: the run shall end after a checkpoint. Asked a second time it ends without one, unless a launcher
            passes signals on: one to all processes of a job then comes twice, and the launcher minds the second.
    """

    def __init__(self) -> None:
        self.save = False
        self.stop = False
        self._is_interruptible = False

    def listen(self) -> None:
        """Handle SIGUSR1 and SIGTERM from now on; call it in the main thread."""
        signal.signal(signal.SIGUSR1, self._on_save)
        signal.signal(signal.SIGTERM, self._on_stop)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let SIGTERM break off the body, which must leave the state of the run as it was.

        Raises:
            StopRequested: SIGTERM came, now or before.
        """
        if self.stop:
            raise StopRequested
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    @contextlib.contextmanager
    def uninterruptible(self) -> Iterator[None]:
        """Within ``interruptible``, put SIGTERM off until the body is done, because other processes wait for it.

        Raises:
            StopRequested: SIGTERM came meanwhile.
        """
        was_interruptible, self._is_interruptible = self._is_interruptible, False
        yield
        if was_interruptible and self.stop:
            raise StopRequested
        self._is_interruptible = was_interruptible

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            if has_launcher():
                return
            sys.exit(128 + number)
        self.stop = True
        if self._is_interruptible:
            self._is_interruptible = False  # what unwinds must not be broken off as well
            raise StopRequested
