"""Writing a checkpoint while training goes on: the copy of the state, and the thread that writes the copy."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

MAX_COPY_THREADS = 8


class CopyBuffers:
    """Memory that arrays are copied into, kept from one copy to the next.

    Fresh memory would cost more than the copy itself: the kernel clears every page of it first. Several threads copy,
    since one cannot use all of the memory's bandwidth, and training waits.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], np.ndarray] = {}

    def copy(self, group: str, arrays: Iterable[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
        """Copy named arrays; the copies of a group are valid until the group is copied again."""
        num_threads = min(MAX_COPY_THREADS, len(os.sched_getaffinity(0)))
        copies: list[tuple[str, Future[np.ndarray]]] = []
        with ThreadPoolExecutor(num_threads) as pool:
            for name, array in arrays:
                if len(copies) >= num_threads:
                    copies[-num_threads][1].result()  # an array that is drawn may take memory until it is copied
                copies.append((name, pool.submit(self._copy, (group, name), array)))
        return [(name, copy.result()) for name, copy in copies]

    def _copy(self, key: tuple[str, str], array: np.ndarray) -> np.ndarray:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != array.shape or buffer.dtype != array.dtype:
            buffer = self._buffers[key] = np.empty_like(array, order="C")
        np.copyto(buffer, array)
        return buffer


class BackgroundWriter:
    """Runs writes in a thread, at most one at a time; a failed one is raised by the next call, once.

    The thread is no daemon: the interpreter does not end before a write has.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """True while a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], None]) -> None:
        """Wait for the write under way, if there is one, then begin another.

        Raises:
            what an earlier write raised; ``write`` is not begun then.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint-writer")
        self._thread.start()

    def check(self) -> None:
        """Raise what an earlier write raised, without waiting for one under way."""
        if not self.is_running:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written; raise what the last write raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
