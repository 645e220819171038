"""The images that a rank's models look at: they pass the tower once in a step."""

from collections.abc import Iterator, Sequence

import mindspore as ms
import numpy as np

from mindrlhf.images.geometry import VisionGeometry
from mindrlhf.images.pixels import image_digest
from mindrlhf.images.slots import fill_slots, slot_rows

# Patches of one run of the tower: some images of a usual size, or a single large one.
_PATCHES_PER_RUN = 4096


class ImageRows:
    """Rows of the tower's output by image, of one model.

    Args:
        tower: cell over slots of patches; see :class:`mindrlhf.models.vision.tower.VisionTower`.
        image_rows: the parameter `[N, H]` that the decoder's inputs look rows up in.
        geometry: how images are cut.
        window_side: tokens along each side of an attention window.
    """

    def __init__(self, tower, image_rows: ms.Parameter, geometry: VisionGeometry, window_side: int):
        self._tower = tower
        self._image_rows = image_rows
        self._geometry = geometry
        self._window_side = window_side
        self._rows: dict[str, np.ndarray] = {}
        self._borrows = False

    def borrow(self, other: "ImageRows") -> None:
        """From now on, have the rows that a model with the same weights in its tower computes."""
        self._rows, self._borrows = other._rows, True

    def see(self, images: Sequence[np.ndarray]) -> None:
        """Compute the rows of the images of a step, uint8 `[height, width, 3]` each; forget those of the last."""
        if self._borrows:
            return
        self._rows.clear()
        self._rows.update(self._compute(images))

    def _compute(self, images: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield digest and rows of each distinct image."""
        distinct = {image_digest(pixels): pixels for pixels in images}
        for digests, pixels, rows_per_slot, num_slots in self._runs(distinct):
            slots = fill_slots(pixels, num_slots, rows_per_slot, self._geometry, self._window_side)
            arrays = (slots.patches, slots.places, slots.is_patch)
            computed = self._tower(*(ms.Tensor(array) for array in arrays)).asnumpy()
            yield from ((digest, computed[rows]) for digest, rows in zip(digests, slots.outputs))

    def place(self, digests: Sequence[str]) -> None:
        """Give the decoder the rows of these images, one image behind the other."""
        rows = np.zeros(self._image_rows.shape, np.float32)
        filled = np.concatenate([self._rows[digest] for digest in digests]) if digests else rows[:0]
        rows[: len(filled)] = filled
        self._image_rows.set_data(ms.Tensor(rows))

    def _runs(self, images: dict[str, np.ndarray]) -> Iterator[tuple[list[str], list[np.ndarray], int, int]]:
        """Yield what one run of the tower takes: digests, pixels, patches of a slot, number of slots.

        Slots of sizes that double from one to the next, so that few shapes are compiled.
        """
        by_size: dict[int, list[str]] = {}
        for digest, pixels in images.items():
            by_size.setdefault(_slot_size(pixels, self._geometry, self._window_side), []).append(digest)
        for rows_per_slot, digests in sorted(by_size.items()):
            num_slots = max(1, _PATCHES_PER_RUN // rows_per_slot)
            for start in range(0, len(digests), num_slots):
                chosen = digests[start : start + num_slots]
                yield chosen, [images[digest] for digest in chosen], rows_per_slot, num_slots


def _slot_size(pixels: np.ndarray, geometry: VisionGeometry, window_side: int) -> int:
    """Patches of the smallest slot for an image, of sizes that double from one window on."""
    window = (window_side * geometry.merge) ** 2
    return window << (slot_rows(pixels, geometry, window_side) // window - 1).bit_length()
