"""Experiment trackers of others that a run can report to; each is the module of its name, which has a ``Tracker``.

What they need is an optional extra of the package, and is loaded when a run opens the tracker, not before.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mindrlhf.errors import UserError

# What each is imported as; the extra that installs it has the tracker's name.
PACKAGES = {
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
}


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker opens it."""

    project: str
    name: str
    run_id: str  # 21 lower-case letters and digits, the same after a resume
    directory: Path  # for what the tracker keeps on this machine
    config: Mapping[str, Any]  # section -> key -> value, as JSON has them


class Tracker(Protocol):
    """A tracker, constructed from a ``TrackedRun``; one thread calls all its methods, and what they raise is reported.

    A run that is resumed opens the same run again, and may write steps again that were written before.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Open the run, with its config."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step, which may not be finite."""

    def write_samples(self, step: int, samples: Sequence[str]) -> None:
        """Record a few samples of a step, prompt and response as text."""

    def write_report(self, path: Path) -> None:
        """Keep the HTML report of the run."""

    def close(self, *, is_complete: bool) -> None:
        """End the run; ``is_complete`` is false when it failed or will go on later."""


def check_trackers(sinks: Sequence[str]) -> None:
    """Check that the trackers among ``observe.sinks`` are installed.

    Raises:
        UserError: some are not.
    """
    missing = [name for name in sinks if name in PACKAGES and not _is_installed(PACKAGES[name])]
    if missing:
        are = "which is" if len(missing) == 1 else "which are"
        raise UserError(
            f"'observe.sinks' has {', '.join(missing)}, {are} not installed: pip install "
            f"'mindrlhf[{','.join(missing)}]', or take it out"
        )


def _is_installed(package: str) -> bool:
    # A folder of that name without code, such as wandb makes for its files, is found as well, but has no origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def load_tracker(name: str) -> type[Tracker]:
    """Return the class of a tracker, which loads its package."""
    return importlib.import_module(f"{__name__}.{name}").Tracker
