"""Tables of rotary position embeddings (NumPy only)."""

import math

import numpy as np

from mindrlhf.specs import ModelDims, YarnDims
from mindrlhf.specs.llama import slow_down


def rotary_dim(dims: ModelDims) -> int:
    """Channels per head that are rotated."""
    return dims.latent.rope_dim if dims.latent else dims.rotary_dim or dims.head_dim


def rotary_frequencies(dims: ModelDims) -> np.ndarray:
    """Radians per position of each pair of channels, `[rotary_dim / 2]`, float32."""
    width = rotary_dim(dims)
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequencies = (1.0 / dims.rope_theta**exponents).astype(np.float32)
    if dims.llama3:
        return slow_down(frequencies, dims.llama3)
    if dims.yarn:
        return _extend(frequencies, dims.yarn, dims.rope_theta)
    return frequencies / np.float32(dims.rope_factor)


def axis_frequencies(dims: ModelDims) -> np.ndarray:
    """The same for positions of time, row and column, `[3, rotary_dim / 2]`: each pair is turned by one of them."""
    sections = dims.vision.mrope_sections
    axis_of_pair = np.repeat(np.arange(3), sections)
    if dims.vision.is_interleaved:  # time, row, column, time, .. while there are pairs for row and column
        pairs = np.arange(sum(sections))
        axis_of_pair = sum(axis * ((pairs % 3 == axis) & (pairs < 3 * sections[axis])) for axis in (1, 2))
    return np.eye(3, dtype=np.float32)[axis_of_pair].T * rotary_frequencies(dims)


def score_scale(dims: ModelDims) -> float:
    """Factor of products of queries and keys; YaRN sharpens them (arXiv:2309.00071, section 3.4)."""
    sharpness = 0.1 * dims.yarn.mscale * math.log(dims.yarn.factor) + 1.0 if dims.yarn and dims.yarn.factor > 1 else 1.0
    return sharpness**2 * (dims.score_divisor or dims.head_dim) ** -0.5


def embedding_scale(dims: ModelDims) -> float | None:
    """Factor of embeddings; None for 1."""
    return dims.hidden_size**0.5 if dims.scales_embedding else None


def rotary_tables(length: int, dims: ModelDims) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines `[length, rotary_dim]`, float32, each in the place of the channel that it belongs to.

    Where only the beginning of a head is rotated, those of the other channels follow, which turn by nothing.
    """
    angles = np.outer(np.arange(length, dtype=np.float32), rotary_frequencies(dims))
    angles = np.repeat(angles, 2, axis=1) if _is_interleaved(dims) else np.concatenate([angles, angles], axis=1)
    angles = np.pad(angles, ((0, 0), (0, _num_unrotated(dims))))
    return np.cos(angles), np.sin(angles)


def turn_matrix(dims: ModelDims) -> np.ndarray:
    """Matrix R `[rotary_dim, rotary_dim]` with (x @ R) = x, turned a quarter in the plane of each pair of channels.

    Channels of a head that are not rotated follow, as zeros.
    """
    half = np.eye(rotary_dim(dims) // 2, dtype=np.float32)
    quarter = np.array([[0, 1], [-1, 0]], np.float32)
    turned = np.kron(half, quarter) if _is_interleaved(dims) else np.kron(quarter, half)
    return np.pad(turned, (0, _num_unrotated(dims)))


def _num_unrotated(dims: ModelDims) -> int:
    return 0 if dims.latent else dims.head_dim - rotary_dim(dims)


def _is_interleaved(dims: ModelDims) -> bool:
    """Return whether neighbours are a pair, as in latent attention; else channel i and i + rotary_dim / 2 are."""
    return dims.latent is not None or dims.rotates_neighbours


def _extend(frequencies: np.ndarray, yarn: YarnDims, theta: float) -> np.ndarray:
    """YaRN's mixture of kept and slowed frequencies ("NTK-by-parts", arXiv:2309.00071, section 3.2).

    The ramp runs between the whole channels next to those that turn `beta_fast` and `beta_slow` times in the original
    context length.
    """
    width = 2 * len(frequencies)

    def channel(num_turns: float) -> float:
        return width * math.log(yarn.original_length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), width - 1)
    # A step where the ramp has no length.
    run = (high - low) or 0.001
    slowed = np.clip((np.arange(width // 2, dtype=np.float32) - low) / np.float32(run), 0, 1)
    return (frequencies / np.float32(yarn.factor) * slowed + frequencies * (1 - slowed)).astype(np.float32)
