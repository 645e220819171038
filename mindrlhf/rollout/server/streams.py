"""The keys of samples' random streams.

The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from typing import TypeVar

import numpy as np

_Word = TypeVar("_Word", int, np.ndarray)  # 64 bits: of one number, or uint64 of each
_MASK = (1 << 64) - 1


def stream_key(seed: int, sample_index: int) -> int:
    """The key of the random stream of sample ``sample_index`` of a request, an integer in [0, 2**64)."""
    return mix((mix(seed & _MASK) + sample_index) & _MASK)


def mix(x: _Word) -> _Word:
    """Scatter 64-bit numbers over [0, 2**64), no two to one place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 31)
