"""The images that a rank's models look at: they pass a frozen tower once in a step, a trained one in every graph."""

from collections.abc import Iterator, Sequence

import mindspore as ms
import numpy as np

from mindrlhf.images.geometry import VisionGeometry
from mindrlhf.images.pixels import image_digest
from mindrlhf.images.slots import fill_slots, slot_rows

# Patches of one run of the tower: some images of a usual size, or a single large one.
_PATCHES_PER_RUN = 4096


class ImageRows:
    """Rows of a frozen tower's output by image, of one model.

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

    def look(self, images: Sequence[np.ndarray]) -> None:
        """Run the tower on images, for who watches its cells; no rows are kept, and none are computed if borrowed."""
        if not self._borrows:
            for _ in self._compute(images):
                pass

    def _compute(self, images: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield digest and rows of each distinct image."""
        distinct = {image_digest(pixels): pixels for pixels in images}
        for digests, pixels, rows_per_slot, num_slots in self._runs(distinct):
            slots = fill_slots(pixels, num_slots, rows_per_slot, self._geometry, self._window_side)
            arrays = (slots.patches, slots.places, slots.is_patch)
            computed = self._tower(*(ms.Tensor(array) for array in arrays)).asnumpy()
            yield from ((digest, computed[rows]) for digest, rows in zip(digests, slots.outputs))

    def shape_of(self, digests: Sequence[str]) -> tuple[int, ...]:
        """What of the shape of a graph's inputs depends on the images: nothing."""
        return ()

    def inputs(self, input_ids: ms.Tensor, digests: Sequence[str]) -> ms.Tensor:
        """Return the decoder's first input; it is given the rows of these images."""
        self.place(digests)
        return input_ids

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


class ImagePatches:
    """The images of a step as inputs of a graph in which the tower is trained.

    Args:
        num_image_rows: image rows of a micro-batch, at most.
        geometry, window_side: see :class:`ImageRows`.
    """

    def __init__(self, num_image_rows: int, geometry: VisionGeometry, window_side: int):
        self._num_image_rows = num_image_rows
        self._geometry = geometry
        self._window_side = window_side
        self._pixels: dict[str, np.ndarray] = {}

    def see(self, images: Sequence[np.ndarray]) -> None:
        """Take the images of a step, uint8 `[height, width, 3]` each; forget those of the last."""
        self._pixels = {image_digest(pixels): pixels for pixels in images}

    def look(self, images: Sequence[np.ndarray]) -> None:
        """See :meth:`ImageRows.look`: a tower that is trained runs in every pass of the decoder."""

    def shape_of(self, digests: Sequence[str]) -> tuple[int, ...]:
        """Slots, a power of four, and patches of a slot, in doubling sizes, for these images: few shapes to compile."""
        window = (self._window_side * self._geometry.merge) ** 2
        sizes = [_slot_size(self._pixels[digest], self._geometry, self._window_side) for digest in digests]
        num_doublings = max(0, len(sizes) - 1).bit_length()
        return 1 << num_doublings + num_doublings % 2, max(sizes, default=window)

    def inputs(self, input_ids: ms.Tensor, digests: Sequence[str]) -> tuple[ms.Tensor, ...]:
        """Return the decoder's first input with the patches of these images."""
        images = [self._pixels[digest] for digest in digests]
        slots = fill_slots(images, *self.shape_of(digests), self._geometry, self._window_side)
        order = np.zeros(self._num_image_rows, np.int32)
        rows = np.concatenate([order[:0], *slots.outputs])
        order[: len(rows)] = rows
        arrays = (slots.patches, slots.places, slots.is_patch, order)
        # A tuple that is not mutable is a constant of the graph, which would be compiled for each batch anew.
        return ms.mutable((input_ids, *(ms.Tensor(array) for array in arrays)))


def _slot_size(pixels: np.ndarray, geometry: VisionGeometry, window_side: int) -> int:
    """Patches of the smallest slot for an image, of sizes that double from one window on."""
    window = (window_side * geometry.merge) ** 2
    return window << (slot_rows(pixels, geometry, window_side) // window - 1).bit_length()
