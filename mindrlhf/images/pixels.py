"""Image files to pixels of the size that a model sees, and back to a file without loss."""

import contextlib
import hashlib
import io
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageOps

from mindrlhf.images.geometry import PixelLimits

# No others: some of Pillow's readers start programs (EPS) or read files beside the image.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Modes whose conversion to RGB keeps the picture. 16 and 32 bit ones Pillow cuts off at 255.
_MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})
# What a decoder may be asked to unpack, some 200 MB of RGB.
MAX_SOURCE_PIXELS = 1 << 26


class ImageError(ValueError):
    """An image cannot be used; the message says why."""


def decode_image(data: bytes, limits: PixelLimits) -> np.ndarray:
    """Decode an image file and resize it as transformers' Qwen2VLImageProcessor (Pillow) does.

    The picture is turned upright as its EXIF data says, and what is transparent becomes white, as in qwen_vl_utils.

    Returns:
        uint8 ``[height, width, 3]``, sides multiples of ``limits.side``.

    Raises:
        ImageError: no image, one of another format, one that is broken, too large, too narrow, of one pixel's height or
            width, or moves.
    """
    image = _decode(data)
    try:
        rows, columns = limits.target_size(image.height, image.width)
    except ValueError as error:
        raise ImageError(str(error)) from error
    if (rows, columns) != (image.height, image.width):
        image = image.resize((columns, rows), Image.Resampling.BICUBIC)
    return np.asarray(image)


def encode_png(pixels: np.ndarray) -> bytes:
    """Return uint8 ``[height, width, 3]`` as a PNG file, which ``decode_png`` gives back."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def decode_png(data: bytes) -> np.ndarray:
    """Return the uint8 ``[height, width, 3]`` that ``encode_png`` was given."""
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        if image.width * image.height > MAX_SOURCE_PIXELS:
            raise ImageError(f"{image.width} x {image.height} pixels are over the limit of {MAX_SOURCE_PIXELS}")
        return np.asarray(image)


def image_digest(pixels: np.ndarray) -> str:
    """SHA-256 over shape and bytes of uint8 ``[height, width, 3]``, in hex: the name of an image everywhere."""
    digest = hashlib.sha256(np.asarray(pixels.shape, "<i8").tobytes())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def _decode(data: bytes) -> Image.Image:
    """Return the image as RGB, in its own size."""
    with _image_errors():
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check(image)
            if image.format == "PNG":
                # The decoder itself leaves the checksums of the pixels out.
                with Image.open(io.BytesIO(data), formats=("PNG",)) as checked:
                    checked.verify()
            image = ImageOps.exif_transpose(image)
            if image.has_transparency_data:
                layer = image.convert("RGBA")
                image = Image.new("RGBA", layer.size, (255, 255, 255, 255))
                image.alpha_composite(layer)
            return image.convert("RGB")


def _check(image: Image.Image) -> None:
    """Look at what the head of a file says, before anything is unpacked."""
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        raise ImageError(
            f"{width} x {height} pixels are over the limit of {MAX_SOURCE_PIXELS >> 20} Mi: make it smaller"
        )
    if min(width, height) < 2:
        raise ImageError(f"{width} x {height} pixels show nothing")
    # A phone's MPO has a preview or a depth map behind the picture.
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        raise ImageError(f"it has {image.n_frames} frames or pages: save the one that is meant")
    if image.mode not in _MODES:
        raise ImageError(f"its pixels are of mode {image.mode!r}: save it with 8 bits a channel")


@contextlib.contextmanager
def _image_errors() -> Iterator[None]:
    """Turn whatever a decoder raises into an ``ImageError``; damaged files bring up nearly every error there is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImageError:
        raise
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"not an image of a known format ({', '.join(FORMATS)}), or its head is broken") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"it unpacks to far more pixels than the limit of {MAX_SOURCE_PIXELS >> 20} Mi") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"the image is broken: {reason[:120]}") from error
