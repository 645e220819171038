"""What the policy wrote: ``samples.jsonl``, and the pictures it was shown: ``sample_images``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.images.pixels import encode_png, image_digest
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.system.files import write_file

IMAGES_NAME = "sample_images"
TOKEN_VALUES = ("advantages", "rollout_logprobs", "train_logprobs")


@dataclass(frozen=True)
class SampleRecord:
    """One scored sample: text, and the images of its prompt."""

    step: int
    prompt: str
    completion: str
    answer: str  # the reference answer, "" when the prompt has none
    reward: float  # weighted total
    rewards: Mapping[str, float]  # unweighted, by verifier
    finish_reason: str  # "stop" or "length"
    images: tuple[np.ndarray, ...] = ()  # uint8 [height, width, 3] each
    extra: Mapping[str, Any] = field(default_factory=dict)  # kept columns of the prompt, JSON values by name
    # "tokens": their texts, and by the names of TOKEN_VALUES a number for each, None where the model did not write it
    tokens: Mapping[str, list] | None = None


class SampleWriter:
    """Append samples to ``samples.jsonl``; see ``JsonlWriter`` for ``first_step`` and the errors.

    Images go to ``sample_images`` beside it, each once, as a PNG file with its digest for a name, which the line has.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._writer = JsonlWriter(path, first_step=first_step)
        self._image_dir = Path(path).parent / IMAGES_NAME

    def write(self, samples: Iterable[SampleRecord]) -> None:
        """Append the samples of one step."""
        for sample in samples:
            line = {**vars(sample), "rewards": dict(sample.rewards), "images": self._keep(sample.images)}
            line["extra"] = dict(sample.extra)
            for name in ("images", "extra"):
                if not line[name]:
                    del line[name]
            line |= line.pop("tokens") or {}
            self._writer.write(line)

    def _keep(self, images: Iterable[np.ndarray]) -> list[str]:
        """Write the images that are not there yet; return the digests of all."""
        digests = []
        for pixels in images:
            digests.append(image_digest(pixels))
            path = self._image_dir / f"{digests[-1]}.png"
            try:
                self._image_dir.mkdir(exist_ok=True)
                if not path.exists():
                    write_file(path, encode_png(pixels))
            except OSError as failure:
                raise RunFailure(f"cannot write {path}: {failure.strerror}") from failure
        return digests

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
