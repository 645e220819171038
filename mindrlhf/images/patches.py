"""Pixels to the patches that a vision tower takes."""

import numpy as np

from mindrlhf.images.geometry import VisionGeometry


def patch_rows(pixels: np.ndarray, geometry: VisionGeometry) -> np.ndarray:
    """Normalise an image and cut it into patches, bit for bit as transformers' Qwen2VLImageProcessor (Pillow) does.

    Args:
        pixels: uint8 ``[height, width, 3]``, sides multiples of ``geometry.token_side``.

    Returns:
        float32 ``[h * w, patch_size]`` for an image of ``h`` x ``w`` patches: patches of one token side by side, tokens
        row by row. A patch is in the order channel, frame, row, column.
    """
    rows, columns = geometry.token_grid(*pixels.shape[:2])
    merge, patch = geometry.merge, geometry.patch
    # Transformers scales in float64 and normalises in float32; other orders give other bits.
    scaled = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    normalised = (scaled - np.asarray(geometry.mean, np.float32)) / np.asarray(geometry.std, np.float32)
    cut = normalised.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.broadcast_to(cut[:, :, :, :, :, None], (*cut.shape[:5], geometry.frames, patch, patch))
    return np.ascontiguousarray(frames.reshape(rows * columns * merge * merge, geometry.patch_size))
