"""What a target of fuzzing is."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.errors import RunFailure, UserError

Case = Callable[[random.Random], object]


@dataclass(frozen=True)
class Target:
    """A parser under test.

    Attributes:
        prepare: makes valid input in a directory and returns a function that damages a copy of it with the random
            generator it is given, parses the result, and uses what came out as the package does.
        refusals: the errors by which the parser may refuse.
    """

    prepare: Callable[[Path], Case]
    refusals: tuple[type[Exception], ...] = (UserError, RunFailure)
