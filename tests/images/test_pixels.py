"""Sizes, pixels and patches against transformers' Pillow processor; decoding of files that are not plain RGB."""

import hashlib
import io

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor, smart_resize

from mindrlhf.errors import UserError
from mindrlhf.images.geometry import PixelLimits, VisionGeometry
from mindrlhf.images.patches import patch_rows
from mindrlhf.images.pixels import ImageError, decode_image, decode_png, encode_png, image_digest

LIMITS = PixelLimits(min_pixels=4 * 784, max_pixels=64 * 784)


def picture(height, width, seed=0):
    """A smooth picture, since noise would hide mistakes of resampling."""
    coarse = np.random.default_rng(seed).integers(0, 255, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def as_file(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decode(image, kind="PNG", limits=LIMITS, **options):
    return decode_image(as_file(image, kind, **options), limits)


@pytest.mark.parametrize(
    "height, width", [(100, 170), (224, 224), (300, 500), (20, 31), (56, 84), (641, 333), (2, 3), (28, 2800)]
)
def test_pixels_and_patches_have_the_bits_of_transformers(height, width):
    image = picture(height, width)
    limits = PixelLimits(min_pixels=4 * 784, max_pixels=128 * 784)
    processor = Qwen2VLImageProcessor(min_pixels=limits.min_pixels, max_pixels=limits.max_pixels)
    want = processor(images=[image], return_tensors="np")
    pixels = decode(image, limits=limits)
    rows = patch_rows(pixels, VisionGeometry())
    assert (1, pixels.shape[0] // 14, pixels.shape[1] // 14) == tuple(want["image_grid_thw"][0])
    assert rows.dtype == np.float32 and np.array_equal(rows, want["pixel_values"])


def test_sizes_are_those_of_smart_resize_and_stay_when_they_are_resized_again():
    rng = np.random.default_rng(1)
    for height, width in rng.integers(2, 3000, (500, 2)):
        minimum = int(rng.integers(1, 20)) * 784
        limits = PixelLimits(minimum, minimum * 4)
        try:
            size = limits.target_size(height, width)
        except ValueError:
            assert max(height, width) > 4 * min(height, width)  # only shapes that are far from square
            continue
        assert size == smart_resize(int(height), int(width), 28, limits.min_pixels, limits.max_pixels)
        assert limits.target_size(*size) == size
        assert limits.min_pixels <= size[0] * size[1] <= limits.max_pixels
        assert limits.max_tokens >= np.prod(VisionGeometry().token_grid(*size))


@pytest.mark.parametrize("size, words", [((28, 5601), "over 200 to 1"), ((5572, 28), "no size of 3136 to 50176")])
def test_narrow_images_are_refused_where_transformers_goes_over_its_limit(size, words):
    with pytest.raises(ImageError, match=words):
        decode(Image.new("RGB", size))


@pytest.mark.parametrize("limits, words", [((1, 783), "max_pixels is 783"), ((0, 784), "min_pixels is 0")])
def test_limits_that_no_image_meets_are_refused(limits, words):
    with pytest.raises(UserError, match=words):
        PixelLimits(*limits)


def test_patches_are_in_the_order_that_the_tower_takes():
    geometry = VisionGeometry()
    pixels = np.random.default_rng(2).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    rows = patch_rows(pixels, geometry).reshape(-1, 3, 2, 14, 14)
    place = 0
    for token_row in range(2):
        for token_column in range(3):
            for row in (2 * token_row, 2 * token_row + 1):
                for column in (2 * token_column, 2 * token_column + 1):
                    cut = pixels[14 * row : 14 * row + 14, 14 * column : 14 * column + 14].astype(np.float64) / 255
                    want = ((cut - geometry.mean) / geometry.std).transpose(2, 0, 1)
                    np.testing.assert_allclose(rows[place, :, 0], want, atol=1e-6)
                    np.testing.assert_array_equal(rows[place, :, 0], rows[place, :, 1])
                    place += 1
    assert place == len(rows)


def test_a_png_of_pixels_gives_them_back():
    pixels = np.random.default_rng(3).integers(0, 256, (56, 28, 3), dtype=np.uint8)
    assert np.array_equal(decode_png(encode_png(pixels)), pixels)
    assert np.array_equal(decode_image(encode_png(pixels), PixelLimits(1, 784 * 2)), pixels)


def test_digests_tell_shapes_and_bytes_apart():
    pixels = np.zeros((56, 28, 3), np.uint8)
    want = hashlib.sha256(b"".join(n.to_bytes(8, "little") for n in (56, 28, 3)) + bytes(56 * 28 * 3)).hexdigest()
    assert image_digest(pixels) == want
    assert image_digest(pixels.transpose(1, 0, 2)) != want
    other = pixels.copy()
    other[55, 27, 2] = 1
    assert image_digest(other) != want


def test_pictures_are_turned_upright():
    image = picture(56, 84)
    for turn, undone in (
        (3, Image.Transpose.ROTATE_180),
        (6, Image.Transpose.ROTATE_270),
        (8, Image.Transpose.ROTATE_90),
    ):
        exif = Image.Exif()
        exif[0x0112] = turn
        assert np.array_equal(decode(image, exif=exif), np.asarray(image.transpose(undone)))


def test_what_is_transparent_is_white():
    image = picture(56, 56).convert("RGBA")
    alpha = np.full((56, 56), 255, np.uint8)
    alpha[:28] = 0
    image.putalpha(Image.fromarray(alpha))
    pixels = decode(image)
    assert (pixels[:28] == 255).all()
    assert np.array_equal(pixels[28:], np.asarray(picture(56, 56))[28:])
    palette = Image.new("P", (56, 56), 0)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.paste(1, (0, 0, 56, 28))
    pixels = decode(palette, transparency=0)
    assert (pixels[:28] == (40, 50, 60)).all() and (pixels[28:] == 255).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "CMYK"])
def test_other_modes_become_rgb_as_transformers_has_them(mode):
    image = picture(56, 84).convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert np.array_equal(decode(image, kind), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM"])
def test_damage_gives_pixels_or_a_reason_and_nothing_else(kind):
    data = as_file(picture(56, 84), kind)
    rng = np.random.default_rng(6)
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for position in rng.integers(0, len(data), rng.integers(1, 6)):
            damaged[position] = rng.integers(256)
        try:
            pixels = decode_image(bytes(damaged[: rng.integers(len(data) // 2, len(data) + 1)]), LIMITS)
        except ImageError as error:
            num_refused += 1
            assert "\n" not in str(error) and len(str(error)) < 200
        else:
            assert pixels.dtype == np.uint8 and pixels.shape[2] == 3
    assert num_refused > 20
