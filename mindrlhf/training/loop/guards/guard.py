"""What every guard of a run's numbers is, and how it tells what it found."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindrlhf.observe.records import JsonlWriter
from mindrlhf.rollout.samples import Sample
from mindrlhf.training.loop.step import Step

EVENTS_NAME = "guards.jsonl"


class Guard:
    """Looks at each step for one thing that goes wrong. Each overrides what it needs to see.

    Attributes:
        METRIC: name of the count of updates that it found, "" when it counts none.
        failure: why the run must stop, "" while it may go on.
    """

    METRIC = ""
    failure = ""

    def review_rewards(self, step: int, samples: Sequence[Sample]) -> None:
        """Look at all samples that a step, from 1, generated, whether trained on or not."""

    def review_update(self, step: Step, number: int) -> bool:
        """Look at update ``number``, from 0, of a step and return whether something is wrong with it."""
        return False

    def review_logprobs(self, step: int, rollout_diff: float) -> None:
        """Look at ``rollout_diff/mean_abs`` of a step, from 1, in nats."""


class Events:
    """``guards.jsonl``, and a warning on the console for each event; see ``JsonlWriter`` for ``first_step``."""

    def __init__(self, output_dir: Path, *, first_step: int):
        self.path = output_dir / EVENTS_NAME
        self._writer = JsonlWriter(self.path, first_step=first_step)

    def write(self, step: int, event: str, warning: str, **values: Any) -> None:
        """Write an event of a step and warn of it."""
        self._writer.write({"step": step, "event": event, **values})
        warn(warning)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def describe(sample: Sample) -> dict[str, Any]:
    """Return what identifies a sample, as JSON values."""
    return {"prompt": sample.prompt_text, "completion": sample.response_text, "reward": sample.reward.total}


def warn(text: str) -> None:
    """Print a line of warning."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
