"""Tensors of any bits, so also numbers that are none, for tests of what carries them."""

from collections.abc import Sequence

import numpy as np

from mindrlhf.weights.tensors import TensorInfo


def random_bits(infos: Sequence[TensorInfo], seed: int) -> dict[str, np.ndarray]:
    """Return an array for each tensor; bfloat16 as uint16 bit patterns."""
    random = np.random.default_rng(seed)
    return {
        info.name: random.integers(0, 256, (*info.shape, info.numpy_dtype.itemsize), np.uint8)
        .view(info.numpy_dtype)
        .reshape(info.shape)
        for info in infos
    }
