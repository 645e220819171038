"""Running the cases of a target: each from a seed of its own, so that any one can be run again alone."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fuzz_targets import TARGETS


@dataclass
class Outcome:
    """What the cases of one target ended with.

    Attributes:
        unexpected: (case, error) of every case that ended with an error that is not of the target's own.
        slowest: (seconds, case).
    """

    num_accepted: int = 0
    num_refused: int = 0
    unexpected: list[tuple[int, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)


def run_cases(
    name: str, directory: Path, seed: int, cases: Iterable[int], on_start: Callable[[int], None] = lambda case: None
) -> Outcome:
    """Run some cases of a target in ``directory``, which must be empty."""
    target, outcome = TARGETS[name], Outcome()
    run = target.prepare(directory)
    for case in cases:
        on_start(case)
        rng = random.Random(f"{seed}/{name}/{case}")
        started = time.perf_counter()
        try:
            run(rng)
            outcome.num_accepted += 1
        except target.refusals:
            outcome.num_refused += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a library in Rust is none of Exception's
            outcome.unexpected.append((case, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
        outcome.slowest = max(outcome.slowest, (time.perf_counter() - started, case))
    return outcome
