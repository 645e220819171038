"""What the policy wrote: ``samples.jsonl``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.observe.records import JsonlWriter


@dataclass(frozen=True)
class SampleRecord:
    """One scored sample, as text."""

    step: int
    prompt: str
    completion: str
    answer: str  # the reference answer, "" when the prompt has none
    reward: float  # weighted total
    rewards: Mapping[str, float]  # unweighted, by verifier
    finish_reason: str  # "stop" or "length"


class SampleWriter:
    """Append samples to ``samples.jsonl``; see ``JsonlWriter`` for ``first_step`` and the errors."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._writer = JsonlWriter(path, first_step=first_step)

    def write(self, samples: Iterable[SampleRecord]) -> None:
        """Append the samples of one step."""
        for sample in samples:
            self._writer.write({**vars(sample), "rewards": dict(sample.rewards)})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
