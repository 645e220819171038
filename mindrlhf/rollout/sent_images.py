"""Images on their way from the trainer to a rollout server: each once in a message, however many prompts show it.

This module is imported by the rollout interpreter too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.images.pixels import image_digest


@dataclass(frozen=True)
class SentImage:
    """An image as a server gets it."""

    digest: str  # see ``image_digest``
    pixels: np.ndarray  # uint8 [height, width, 3]


def pack_images(images: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the images of a batch of prompts as arrays of a message: none when no prompt has an image.

    They are ``image_counts`` ``[prompts]``, ``image_numbers`` ``[all images]`` (which of the distinct images each is),
    and of the distinct ones ``image_digests`` ``[n, 32]``, ``image_sizes`` ``[n, 2]`` and all their ``image_pixels``.
    """
    if not any(images):
        return {}
    numbers: dict[str, int] = {}
    distinct: list[np.ndarray] = []
    order = []
    for pixels in (image for own in images for image in own):
        digest = image_digest(pixels)
        if digest not in numbers:
            numbers[digest] = len(distinct)
            distinct.append(pixels)
        order.append(numbers[digest])
    return {
        "image_counts": np.array([len(own) for own in images], np.int32),
        "image_numbers": np.array(order, np.int32),
        "image_digests": np.frombuffer(bytes.fromhex("".join(numbers)), np.uint8).reshape(-1, 32),
        "image_sizes": np.array([pixels.shape[:2] for pixels in distinct], np.int32),
        "image_pixels": np.concatenate([pixels.ravel() for pixels in distinct]),
    }


def unpack_images(arrays: Mapping[str, np.ndarray]) -> list[tuple[SentImage, ...]]:
    """Return the images of each prompt of a message."""
    num_prompts = len(arrays["prompt_lengths"])
    if "image_counts" not in arrays:
        return [()] * num_prompts
    sizes = arrays["image_sizes"].tolist()
    ends = np.cumsum([3 * height * width for height, width in sizes])
    pixels = np.split(arrays["image_pixels"], ends[:-1])
    distinct = [
        SentImage(digest.tobytes().hex(), own.reshape(height, width, 3))
        for digest, own, (height, width) in zip(arrays["image_digests"], pixels, sizes, strict=True)
    ]
    chosen = [distinct[number] for number in arrays["image_numbers"]]
    starts = np.cumsum(arrays["image_counts"])[:-1].tolist()
    return [tuple(chosen[start:end]) for start, end in zip([0, *starts], [*starts, len(chosen)])]
