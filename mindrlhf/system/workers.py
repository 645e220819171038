"""Methods of the workers of a team, called by their names."""

from collections.abc import Callable
from functools import partial
from typing import Any


class Workers:
    """Stands for the workers of all ranks: a method called here runs on each, and returns what they do in a list.

    Whoever holds one annotates it with the class of the workers, where the methods are. An argument ``per_rank`` has
    the arguments of each rank; others are the same for all.
    """

    def __init__(self, call: Callable[..., list[Any]]):
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., list[Any]]:
        return partial(self._call, method)
