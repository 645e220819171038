"""Geometry and normalisation of a vision model's images."""

import math
from dataclasses import dataclass

from mindrlhf.errors import UserError

# What transformers' Qwen2VLImageProcessor keeps to when a checkpoint says nothing else.
DEFAULT_MIN_PIXELS, DEFAULT_MAX_PIXELS = 56 * 56, 28 * 28 * 1280
# Qwen2-VL's processor refuses what is longer than so many times its width.
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class VisionGeometry:
    """Patches of ``patch`` x ``patch`` pixels, of which ``merge`` x ``merge`` become one token of the language model.

    An image is taken as a film of ``frames`` equal pictures. ``mean`` and ``std`` are of channels R, G, B in [0, 1].
    The values are those of Qwen2-VL and Qwen2.5-VL.
    """

    patch: int = 14
    merge: int = 2
    frames: int = 2
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def token_side(self) -> int:
        """Height and width in pixels of what one token stands for; sides of images are multiples of it."""
        return self.patch * self.merge

    @property
    def patch_size(self) -> int:
        """Numbers in one patch."""
        return 3 * self.frames * self.patch * self.patch

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image of ``height`` x ``width`` pixels, multiples of ``token_side``."""
        assert height % self.token_side == 0 == width % self.token_side, (
            f"{height} x {width} pixels are no whole tokens"
        )
        return height // self.token_side, width // self.token_side


@dataclass(frozen=True)
class PixelLimits:
    """The least and most pixels that an image has once it is resized; its sides are multiples of ``side``.

    Raises:
        UserError: limits that no size meets.
    """

    min_pixels: int = DEFAULT_MIN_PIXELS
    max_pixels: int = DEFAULT_MAX_PIXELS
    side: int = 28  # VisionGeometry.token_side

    def __post_init__(self) -> None:
        if self.max_pixels < self.side**2:
            raise UserError(f"max_pixels is {self.max_pixels}; one image token takes {self.side**2}: give more")
        if not 1 <= self.min_pixels <= self.max_pixels:
            raise UserError(f"min_pixels is {self.min_pixels}; it must be 1 to max_pixels {self.max_pixels}")

    @property
    def max_tokens(self) -> int:
        """The most tokens that an image takes."""
        return self.max_pixels // self.side**2

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image is resized to: about its shape, within the limits (smart_resize).

        Raises:
            ValueError: no such size is near the image's shape.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ValueError(f"{width} x {height} pixels are too narrow (over {MAX_ASPECT_RATIO} to 1)")
        side = self.side
        rows, columns = round(height / side) * side, round(width / side) * side
        if rows * columns > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(side, math.floor(height / shrink / side) * side)
            columns = max(side, math.floor(width / shrink / side) * side)
        elif rows * columns < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
        # Here smart_resize would go over the limit: a side cannot be less than one token.
        if rows * columns > self.max_pixels:
            raise ValueError(
                f"no size of {self.min_pixels} to {self.max_pixels} pixels, its sides multiples of {side}, is near "
                f"{width} x {height}"
            )
        return rows, columns
