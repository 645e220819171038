"""Images of prompts as engines get them. For both interpreters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.images.pixels import image_digest


@dataclass(frozen=True)
class SentImage:
    """An image as a server gets it."""

    digest: str  # see ``image_digest``
    pixels: np.ndarray  # uint8 [height, width, 3]


def with_digests(images: Sequence[Sequence[np.ndarray]]) -> list[tuple[SentImage, ...]]:
    """Return the images of each prompt of a batch; of one that occurs several times the digest is computed once."""
    digests = {id(pixels): image_digest(pixels) for pixels in {id(one): one for own in images for one in own}.values()}
    return [tuple(SentImage(digests[id(pixels)], pixels) for pixels in own) for own in images]
