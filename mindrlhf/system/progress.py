"""Progress line of long commands (n of N, every few seconds)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

_NOW: list[Callable[[], str]] = []  # what is counted now, the innermost last


@contextlib.contextmanager
def watched(count: Callable[[], int], total: int, unit: str) -> Iterator[None]:
    """Have the signs of life say, while the body runs, ``count`` of ``total``."""

    def words() -> str:
        return f"{count():,} of {total:,} {unit}"

    _NOW.append(words)
    try:
        yield
    finally:
        _NOW.remove(words)


def counted(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    """Yield the items, and have the signs of life say meanwhile how many there have been; see ``watched``."""
    number = 0
    with watched(lambda: number, total, unit):
        for item in items:
            yield item
            number += 1


def now() -> str:
    """Return how far the command is, such as "12 of 340 tensors"; "" where nothing is counted."""
    return ", ".join(one() for one in list(_NOW))
