"""The random streams of samples, by a counter-based generator.

Number ``position`` of stream ``key`` is a pure function of the two, so the draw of a sample depends on nothing else in
the batch, and a request that vLLM preempts and computes again meets the same numbers. The function is SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from typing import TypeVar

import numpy as np

_Word = TypeVar("_Word", int, np.ndarray)  # 64 bits: of one number, or uint64 of each
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def stream_key(seed: int, sample_index: int) -> int:
    """The key of the random stream of sample ``sample_index`` of a request, an integer in [0, 2**64)."""
    return mix((mix(seed & _MASK) + sample_index) & _MASK)


def mix(x: _Word) -> _Word:
    """Scatter 64-bit numbers over [0, 2**64), no two to one place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 31)


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number ``positions[i]`` of stream ``keys[i]``: float64 [n] in [0, 1), from uint64 [n] and uint64 [n]."""
    bits = mix(keys + (positions + np.uint64(1)) * np.uint64(_GOLDEN))
    return (bits >> np.uint64(11)) * 2.0**-53
