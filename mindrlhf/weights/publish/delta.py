"""What changed in a tensor since it was last sent, without loss: places and new bits of the elements that differ.

An update of reinforcement learning moves a weight by about the learning rate, which for most weights is less than half
a step of bfloat16: most elements keep their bits. Where so many changed that their places and values would be more than
the tensor, it is sent whole.
"""

from collections.abc import Mapping

import numpy as np

# Places are 16-bit offsets into blocks of as many elements as they can tell apart.
_BLOCK_ELEMENTS = 1 << 16
COUNTS, OFFSETS, VALUES = "counts", "offsets", "values"


def may_repeat(dtype: np.dtype) -> bool:
    """Whether elements of a dtype often keep their bits: with 4 bytes every element changes in every update."""
    return dtype.itemsize == 2


def find_changes(old: np.ndarray, new: np.ndarray) -> dict[str, np.ndarray] | None:
    """Return what makes ``new`` of ``old``, None where ``new`` itself is not larger.

    Args:
        old, new: of one dtype and size, flat.

    Returns:
        "counts" uint32 [blocks], the changed elements of each block of 65,536; "offsets" uint16 [changed], their places
        in their blocks; "values", their new values.
    """
    bits = np.dtype(f"u{new.itemsize}")
    places = np.flatnonzero(old.view(bits) != new.view(bits))
    num_blocks = -(-new.size // _BLOCK_ELEMENTS)
    if 4 * num_blocks + (2 + new.itemsize) * places.size >= new.nbytes:
        return None
    counts = np.bincount(places // _BLOCK_ELEMENTS, minlength=num_blocks)
    offsets = (places % _BLOCK_ELEMENTS).astype(np.uint16)
    return {COUNTS: counts.astype(np.uint32), OFFSETS: offsets, VALUES: new[places]}


def apply_changes(target: np.ndarray, changes: Mapping[str, np.ndarray]) -> None:
    """Put changes into an array of any shape, which need not lie in one piece; its elements count in C order.

    Raises:
        ValueError: they are not of this array.
    """
    counts, offsets, values = (changes[name] for name in (COUNTS, OFFSETS, VALUES))
    num_blocks = -(-target.size // _BLOCK_ELEMENTS)
    if len(counts) != num_blocks or not len(offsets) == len(values) == counts.sum() or values.dtype != target.dtype:
        raise ValueError("the changes are of another array")
    places = np.repeat(np.arange(num_blocks, dtype=np.int64) * _BLOCK_ELEMENTS, counts) + offsets
    if places.size and places.max() >= target.size:
        raise ValueError("a change lies outside of the array")
    if target.flags.c_contiguous:
        target.reshape(-1)[places] = values
    else:
        target[np.unravel_index(places, target.shape)] = values
