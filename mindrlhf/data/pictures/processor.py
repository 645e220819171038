"""Image processing that a checkpoint asks for: ``preprocessor_config.json``."""

from dataclasses import dataclass
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.images.geometry import DEFAULT_MAX_PIXELS, DEFAULT_MIN_PIXELS, PixelLimits, VisionGeometry
from mindrlhf.system.sizes import read_json_object

FILE_NAME = "preprocessor_config.json"
# Image processors whose output is reproduced here.
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
# The token that stands for one cell of an image.
IMAGE_TOKEN = "<|image_pad|>"
# How an image is written where no chat template says it.
IMAGE_FRAME = ("<|vision_start|>", "<|vision_end|>")


@dataclass(frozen=True)
class ImageProcessor:
    """Settings that turn an image into pixels and tokens."""

    geometry: VisionGeometry
    limits: PixelLimits


def read_image_processor(
    directory: str | Path, min_pixels: int | None = None, max_pixels: int | None = None
) -> ImageProcessor | None:
    """Return the image processor of a checkpoint's directory, or None where there is none: its model sees no images.

    Raises:
        UserError: a damaged file, an unknown processor, or limits that no image meets.
    """
    path = Path(directory) / FILE_NAME
    if not path.is_file():
        return None
    fields = read_json_object(path)
    kind = fields.get("image_processor_type")
    if kind not in PROCESSORS:
        raise UserError(f"{path} names the image processor {kind!r}; supported are {', '.join(PROCESSORS)}")
    size = fields.get("size") or {}
    try:
        geometry = VisionGeometry(
            patch=int(fields.get("patch_size", 14)),
            merge=int(fields.get("merge_size", 2)),
            frames=int(fields.get("temporal_patch_size", 2)),
            mean=_channels(fields.get("image_mean", VisionGeometry.mean)),
            std=_channels(fields.get("image_std", VisionGeometry.std)),
        )
        least = int(fields.get("min_pixels") or size.get("shortest_edge") or DEFAULT_MIN_PIXELS)
        most = int(fields.get("max_pixels") or size.get("longest_edge") or DEFAULT_MAX_PIXELS)
        if geometry.patch_size < 1 or geometry.merge < 1 or min(geometry.std) <= 0:
            raise ValueError(f"{geometry}")
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    least, most = (own if own is not None else found for own, found in ((min_pixels, least), (max_pixels, most)))
    return ImageProcessor(geometry, PixelLimits(least, most, geometry.token_side))


def _channels(values: object) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue
