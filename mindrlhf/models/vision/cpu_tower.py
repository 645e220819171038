"""The vision tower of Qwen2.5-VL for the CPU (Bai et al. 2025, arXiv:2502.13923, section 2.1).

Shapes are static: images lie in slots of R patches, window by window (:mod:`mindrlhf.images.slots`). So attention in
windows is attention of `[windows, heads, window, d]`, full attention that of `[slots, heads, R, d]`, and the order is
never undone: whoever lays the patches out knows which row of the output belongs to which token.
"""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.models.cpu_cells import AttentionFunction, Linear, RmsNorm, Rotate
from mindrlhf.models.cpu_decoder import HIDDEN_SCORE
from mindrlhf.specs import ModelDims, VisionDims

NORM_EPS = 1e-6
_ROTARY_BASE = 10_000.0
# Rows and columns of patches that the rotary tables reach: images of 14,336 pixels along a side.
_MAX_PATCHES = 1024


class VisionTower(nn.Cell):
    """Patches to one row for each merged patch, at the width of the decoder.

    Args:
        config: MindFormers' config of the decoder: dtype and initialisation of weights.
        dims: sizes of a model with vision.
    """

    def __init__(self, config, dims: ModelDims):
        super().__init__()
        vision = dims.vision
        self.head_dim = vision.head_dim
        self.patch_embed = PatchEmbed(config, vision)
        self.blocks = nn.CellList(
            [VisionBlock(config, vision, block in vision.full_attention_blocks) for block in range(vision.depth)]
        )
        self.merger = Merger(config, vision, dims.hidden_size)
        cos, sin = _rotary_tables(vision.head_dim)
        self.cos, self.sin = Tensor(cos), Tensor(sin)
        half = np.eye(vision.head_dim // 2, dtype=np.float32)
        self.turn = Tensor(np.block([[np.zeros_like(half), half], [-half, np.zeros_like(half)]]))

    def construct(self, patches, places, is_patch):
        """Return `[I*R/merge^2, H]`.

        Args:
            patches: `[I, R, channels]` float32, zeros where no patch is.
            places: `[I, R, 2]` int32, row and column of each patch.
            is_patch: `[I, R]` float32, 1 where a patch is.
        """
        rows = self.patch_embed(ops.reshape(patches, (-1, patches.shape[-1])))
        hidden_keys = (1.0 - is_patch) * HIDDEN_SCORE
        shape = (rows.shape[0], self.head_dim // 2)
        flat_places = ops.reshape(places, (-1,))
        cos = ops.reshape(ops.gather(self.cos, flat_places, 0), shape)
        sin = ops.reshape(ops.gather(self.sin, flat_places, 0), shape)
        cos, sin = ops.concat((cos, cos), 1), ops.concat((sin, sin), 1)
        for block in self.blocks:
            rows = block(rows, hidden_keys, cos, sin, self.turn)
        return self.merger(rows)


class PatchEmbed(nn.Cell):
    """The 3-D convolution of the checkpoint: a matrix product, since patches do not overlap."""

    def __init__(self, config, vision: VisionDims):
        super().__init__()
        self.proj = _Convolution(config, vision)
        self.shape = (vision.hidden_size, vision.patch_channels)
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, rows):
        return self.matmul(rows, ops.reshape(self.proj.weight, self.shape))


class _Convolution(nn.Cell):
    def __init__(self, config, vision: VisionDims):
        super().__init__()
        shape = (vision.hidden_size, vision.in_channels, vision.temporal_patch_size, *(vision.patch_size,) * 2)
        self.weight = Parameter(config.init_method(shape), name="weight")


class VisionBlock(nn.Cell):
    """Attention and gated MLP, each behind a norm.

    Args:
        config: see :class:`VisionTower`.
        vision: sizes of the tower.
        is_full: attention sees the whole image instead of a window.
    """

    def __init__(self, config, vision: VisionDims, is_full: bool):
        super().__init__()
        self.norm1 = RmsNorm(config, vision.hidden_size, NORM_EPS)
        self.norm2 = RmsNorm(config, vision.hidden_size, NORM_EPS)
        self.attn = VisionAttention(config, vision, is_full)
        self.mlp = VisionMlp(config, vision)

    def construct(self, rows, hidden_keys, cos, sin, turn):
        rows = rows + self.attn(self.norm1(rows), hidden_keys, cos, sin, turn)
        return rows + self.mlp(self.norm2(rows))


class VisionAttention(nn.Cell):
    """Attention without order, within windows or within images; arguments as for :class:`VisionBlock`."""

    def __init__(self, config, vision: VisionDims, is_full: bool):
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = vision.hidden_size, vision.num_heads, vision.head_dim
        self.window = 0 if is_full else (vision.window_side * vision.merge_size) ** 2
        self.qkv = Linear(config, (3 * vision.hidden_size, vision.hidden_size))
        self.proj = Linear(config, (vision.hidden_size, vision.hidden_size))
        self.attention = AttentionFunction()
        self.rotate = Rotate(vision.head_dim)
        self.scale = vision.head_dim**-0.5

    def construct(self, rows, hidden_keys, cos, sin, turn):
        """rows `[I*R, C]`; hidden_keys `[I, R]`, added to scores; cos and sin `[I*R, d]`; turn `[d, d]`."""
        size = self.window or hidden_keys.shape[1]
        groups = rows.shape[0] // size
        heads = ops.reshape(self.qkv(rows), (groups, size, 3, self.num_heads, self.head_dim))
        heads = ops.transpose(heads, (2, 0, 3, 1, 4))
        table = (groups, 1, size, self.head_dim)
        cos, sin = ops.reshape(cos, table), ops.reshape(sin, table)
        query = self.rotate(heads[0], cos, sin, turn) * self.scale
        key = self.rotate(heads[1], cos, sin, turn)
        output, _ = self.attention(query, key, heads[2], ops.reshape(hidden_keys, (groups, 1, 1, size)))
        return self.proj(ops.reshape(ops.transpose(output, (0, 2, 1, 3)), (-1, self.hidden_size)))


class VisionMlp(nn.Cell):
    """SwiGLU with biases."""

    def __init__(self, config, vision: VisionDims):
        super().__init__()
        self.gate_proj = Linear(config, (vision.intermediate_size, vision.hidden_size))
        self.up_proj = Linear(config, (vision.intermediate_size, vision.hidden_size))
        self.down_proj = Linear(config, (vision.hidden_size, vision.intermediate_size))

    def construct(self, rows):
        gate = self.gate_proj(rows)
        return self.down_proj(gate * ops.sigmoid(gate) * self.up_proj(rows))


class Gelu(nn.Cell):
    """x * Phi(x) with the error function, as PyTorch's default: Hendrycks and Gimpel 2016, arXiv:1606.08415."""

    def construct(self, rows):
        return 0.5 * rows * (1.0 + ops.erf(rows * 0.7071067811865476))


class Merger(nn.Cell):
    """Neighbouring patches, side by side, projected to one row of the decoder's width ``hidden_size``."""

    def __init__(self, config, vision: VisionDims, hidden_size: int):
        super().__init__()
        self.width = vision.merged_size
        self.ln_q = RmsNorm(config, vision.hidden_size, NORM_EPS)
        self.mlp = nn.SequentialCell(
            Linear(config, (self.width, self.width)), Gelu(), Linear(config, (hidden_size, self.width))
        )

    def construct(self, rows):
        return self.mlp(ops.reshape(self.ln_q(rows), (-1, self.width)))


def _rotary_tables(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines `[rows or columns, head_dim / 4]` of 2-D rotary positions, float32."""
    width = head_dim // 2
    frequencies = 1.0 / _ROTARY_BASE ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angles = np.outer(np.arange(_MAX_PATCHES, dtype=np.float32), frequencies).astype(np.float32)
    return np.cos(angles), np.sin(angles)
