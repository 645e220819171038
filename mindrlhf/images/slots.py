"""Layout of the patches of several images in the fixed shape that a vision tower with window attention takes.

One image takes one slot of R patches. Its windows come one after the other, each as large as a whole one: those at the
right and lower edge of an image are filled up with patches that nobody looks at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.images.geometry import VisionGeometry
from mindrlhf.images.patches import patch_rows


@dataclass(frozen=True)
class Slots:
    """Images as a vision tower takes them.

    Attributes:
        patches: `[I, R, channels]` float32, zeros where no patch is.
        places: `[I, R, 4]` int32, row and column of each patch in its image; then the image's rows and columns.
        is_patch: `[I, R]` float32, 1 where a patch is.
        outputs: for each image the rows of the tower's output `[I*R/merge^2]` that its tokens take, int64 `[tokens]`.
    """

    patches: np.ndarray
    places: np.ndarray
    is_patch: np.ndarray
    outputs: tuple[np.ndarray, ...]


def slot_rows(pixels: np.ndarray, geometry: VisionGeometry, window_side: int) -> int:
    """Return the patches that the windows of an image take, whole ones all.

    Args:
        pixels: uint8 `[height, width, 3]`.
        geometry: of the patches.
        window_side: tokens along each side of a window.
    """
    rows, columns = geometry.token_grid(*pixels.shape[:2])
    return -(-rows // window_side) * -(-columns // window_side) * (window_side * geometry.merge) ** 2


def fill_slots(
    images: Sequence[np.ndarray], num_slots: int, rows_per_slot: int, geometry: VisionGeometry, window_side: int
) -> Slots:
    """Lay images out; ``slot_rows`` of each is at most ``rows_per_slot``, and slots that are left over stay empty."""
    per_token = geometry.merge**2
    patches = np.zeros((num_slots, rows_per_slot, geometry.patch_size), np.float32)
    places = np.zeros((num_slots, rows_per_slot, 4), np.int32)
    is_patch = np.zeros((num_slots, rows_per_slot), np.float32)
    outputs = []
    for slot, pixels in enumerate(images):
        grid = geometry.token_grid(*pixels.shape[:2])
        tokens = window_places(grid, window_side)
        rows = (tokens[:, None] * per_token + np.arange(per_token)).ravel()
        patches[slot, rows] = patch_rows(pixels, geometry)
        places[slot, rows, :2] = patch_places(grid, geometry.merge)
        places[slot, rows, 2:] = np.multiply(grid, geometry.merge)
        is_patch[slot, rows] = 1
        outputs.append(slot * (rows_per_slot // per_token) + tokens)
    return Slots(patches, places, is_patch, tuple(outputs))


def window_places(grid: tuple[int, int], window_side: int) -> np.ndarray:
    """Return for each token of an image, row by row, its place when windows follow one another: int64 `[tokens]`."""
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    window = row // window_side * -(-grid[1] // window_side) + column // window_side
    within = row % window_side * window_side + column % window_side
    return window * window_side**2 + within


def patch_places(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return row and column of each patch of an image of ``grid`` tokens, in ``patch_rows``' order: `[h*w, 2]`."""
    rows, columns = grid
    places = np.indices((rows * merge, columns * merge)).reshape(2, rows, merge, columns, merge)
    return places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
