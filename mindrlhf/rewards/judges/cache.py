"""Replies of judges by what was asked: a file that the workers of a run, and later runs, share."""

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from mindrlhf.rewards.judges.chat_client import NoAnswer
from mindrlhf.sandbox import time_limit

# SQLite waits this long for another worker's write, which takes milliseconds.
BUSY_TIMEOUT_S = 10.0
LOCK_POLL_S = 0.01
# Offsets of the lock file, one for each key but for rare collisions, which only wait for each other.
LOCK_SPAN = 1 << 32

Value = TypeVar("Value")

_open_caches: dict[str, "AnswerCache"] = {}


def open_cache(path: str) -> "AnswerCache":
    """Return this process's cache in the file ``path``, which is made if need be."""
    if path not in _open_caches:
        _open_caches[path] = AnswerCache(path)
    return _open_caches[path]


class AnswerCache:
    """Replies by key, in an SQLite file; beside it a lock file, so that workers that ask alike ask once.

    Raises:
        ValueError: the file cannot be opened, or is no such cache.
    """

    def __init__(self, path: str):
        self._path = path
        try:
            self._database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            self._database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
            self._lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"cannot use {path} as a cache of judges' answers: {error}") from None

    def answer(self, key: str, ask: Callable[[], str], read: Callable[[str], Value]) -> tuple[Value, bool]:
        """Return what ``read`` makes of the reply to ``key``, and whether the reply was there.

        Another worker that is asking the same is waited for. A reply that ``read`` cannot use is not kept.

        Raises:
            ValueError: the file is damaged.
            NoAnswer: another worker was still asking when the time limit of the sample was near.
        """
        try:
            with self._lock(key):
                row = self._database.execute("SELECT reply FROM answers WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    with contextlib.suppress(ValueError):  # of an older release, that read replies otherwise
                        return read(row[0]), True
                reply = ask()
                value = read(reply)
                self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, reply))
                return value, False
        except sqlite3.Error as error:
            raise ValueError(f"cannot use {self._path} as a cache of judges' answers: {error}") from None

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        # A record lock is the process's: the kernel drops it when a worker is killed.
        offset = int(key[:16], 16) % LOCK_SPAN
        deadline_s = time.monotonic() + time_limit.remaining_s() - 10 * LOCK_POLL_S
        while True:
            try:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise NoAnswer("another worker is still asking the judge the same") from None
                time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, offset)
