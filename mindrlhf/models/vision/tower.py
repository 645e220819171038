"""The vision towers of Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923, section 2.1), Qwen2-VL and Qwen3-VL.

Shapes are static: images lie in slots of R patches, window by window (:mod:`mindrlhf.images.slots`). So attention in
windows is attention of `[windows, heads, window, d]`, full attention that of `[slots, heads, R, d]`, and the order is
never undone: whoever lays the patches out knows which row of the output belongs to which token.
"""

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindrlhf.specs import ModelDims, VisionDims

NORM_EPS = 1e-6
_ROTARY_BASE = 10_000.0
# Rows and columns of patches that the rotary tables reach: images of 14,336 pixels along a side.
_MAX_PATCHES = 1024


class VisionTower(nn.Cell):
    """Patches to one row for each merged patch, at the width of the decoder, float32.

    Args:
        cells: those of a device: :mod:`mindrlhf.models.vision.cpu_tower_cells` or `ascend_tower_cells`.
        config: MindFormers' config of the decoder: dtypes and initialisation of weights.
        dims: sizes of a model with vision.
    """

    def __init__(self, cells, config, dims: ModelDims):
        super().__init__()
        vision = dims.vision
        self.head_dim = vision.head_dim
        self.patch_embed = PatchEmbed(config, vision)
        self.pos_embed = GridPositions(config, vision) if vision.num_positions else None
        self.blocks = nn.CellList(
            [VisionBlock(cells, config, vision, block in vision.full_attention_blocks) for block in range(vision.depth)]
        )
        deep = vision.deepstack_blocks
        self.deepstack_merger_list = nn.CellList(
            [DeepMerger(cells, config, vision, dims.hidden_size, vision.merged_size) for _ in deep]
        )
        # For each block the number of its projector, -1 for none.
        self.deepstack_of = tuple(deep.index(block) if block in deep else -1 for block in range(vision.depth))
        if vision.num_positions:
            self.merger = DeepMerger(cells, config, vision, dims.hidden_size, vision.hidden_size)
        else:
            self.merger = Merger(cells, config, vision, dims.hidden_size)
        self.hidden_keys = cells.HiddenKeys()
        cos, sin = _rotary_tables(vision.head_dim)
        self.cos, self.sin = Tensor(cos), Tensor(sin)

    def construct(self, patches, places, is_patch):
        """Return `[I*R/merge^2, H]`; with D deepstack blocks `[I*R/merge^2, (1 + D) * H]`.

        Args:
            patches: `[I, R, channels]` float32, zeros where no patch is.
            places: `[I, R, 4]` int32, row and column of each patch, and those that its image has.
            is_patch: `[I, R]` float32, 1 where a patch is.
        """
        rows = self.patch_embed(ops.reshape(patches, (-1, patches.shape[-1])))
        hidden_keys = self.hidden_keys(is_patch)
        shape = (rows.shape[0], self.head_dim // 2)
        if self.pos_embed is not None:
            rows = rows + ops.cast(self.pos_embed(ops.reshape(places, (-1, 4))), rows.dtype)
        flat_places = ops.reshape(places[:, :, :2], (-1,))
        cos = ops.reshape(ops.gather(self.cos, flat_places, 0), shape)
        sin = ops.reshape(ops.gather(self.sin, flat_places, 0), shape)
        cos, sin = ops.concat((cos, cos), 1), ops.concat((sin, sin), 1)
        deep = ()
        for index, block in enumerate(self.blocks):
            rows = block(rows, hidden_keys, cos, sin)
            if self.deepstack_of[index] >= 0:
                deep += (self.deepstack_merger_list[self.deepstack_of[index]](rows),)
        merged = self.merger(rows)
        if deep:
            merged = ops.concat((merged,) + deep, 1)
        return ops.cast(merged, ms.float32)


class PatchEmbed(nn.Cell):
    """The 3-D convolution of the checkpoint: a matrix product, since patches do not overlap."""

    def __init__(self, config, vision: VisionDims):
        super().__init__()
        self.proj = _Convolution(config, vision, has_bias=vision.num_positions > 0)
        self.shape = (vision.hidden_size, vision.patch_channels)
        self.matmul = ops.MatMul(transpose_b=True)
        self.dtype = config.compute_dtype

    def construct(self, rows):
        weight = ops.reshape(self.proj.weight, self.shape)
        rows = self.matmul(ops.cast(rows, self.dtype), ops.cast(weight, self.dtype))
        return rows if self.proj.bias is None else rows + ops.cast(self.proj.bias, self.dtype)


class _Convolution(nn.Cell):
    def __init__(self, config, vision: VisionDims, *, has_bias: bool):
        super().__init__()
        shape = (vision.hidden_size, vision.in_channels, vision.temporal_patch_size, *(vision.patch_size,) * 2)
        self.weight = Parameter(config.init_method(shape), name="weight")
        bias = initializer("zeros", shape[:1], config.params_dtype)
        self.bias = Parameter(bias, name="bias") if has_bias else None


class GridPositions(nn.Cell):
    """Learned positions of a square grid, stretched over each image: bilinear, corner on corner."""

    def __init__(self, config, vision: VisionDims):
        super().__init__()
        self.weight = Parameter(config.init_method((vision.num_positions, vision.hidden_size)), name="weight")
        self.side = math.isqrt(vision.num_positions)

    def construct(self, places):
        """Return `[N, C]` for places `[N, 4]`: row, column, and the rows and columns of the image."""
        above, below, down = self._between(places[:, 0], places[:, 2])
        left, right, across = self._between(places[:, 1], places[:, 3])
        upper = self._at(above, left) * (1.0 - across) + self._at(above, right) * across
        lower = self._at(below, left) * (1.0 - across) + self._at(below, right) * across
        return upper * (1.0 - down) + lower * down

    def _between(self, place, number):
        """The two places of the grid around a place `[N]` of ``number`` ones, and how far the second is `[N, 1]`."""
        steps = ops.cast(ops.maximum(number - 1, ops.ones_like(number)), ms.float32)
        exact = ops.cast(place, ms.float32) * (self.side - 1) / steps
        first = ops.floor(exact)
        start = ops.cast(first, ms.int32)
        return start, ops.minimum(start + 1, ops.ones_like(start) * (self.side - 1)), ops.expand_dims(exact - first, 1)

    def _at(self, row, column):
        return ops.cast(ops.gather(self.weight, row * self.side + column, 0), ms.float32)


class VisionBlock(nn.Cell):
    """Attention and gated MLP, each behind a norm.

    Args:
        cells, config: see :class:`VisionTower`.
        vision: sizes of the tower.
        is_full: attention sees the whole image instead of a window.
    """

    def __init__(self, cells, config, vision: VisionDims, is_full: bool):
        super().__init__()
        self.norm1, self.norm2 = _norm(cells, config, vision), _norm(cells, config, vision)
        self.attn = VisionAttention(cells, config, vision, is_full)
        self.mlp = _MLPS[vision.activation](cells, config, vision)

    def construct(self, rows, hidden_keys, cos, sin):
        rows = rows + self.attn(self.norm1(rows), hidden_keys, cos, sin)
        return rows + self.mlp(self.norm2(rows))


class VisionAttention(nn.Cell):
    """Attention without order, within windows or within images; arguments as for :class:`VisionBlock`."""

    def __init__(self, cells, config, vision: VisionDims, is_full: bool):
        super().__init__()
        self.hidden_size, self.num_heads, self.head_dim = vision.hidden_size, vision.num_heads, vision.head_dim
        self.window = 0 if is_full else (vision.window_side * vision.merge_size) ** 2
        self.qkv = cells.Linear(config, (3 * vision.hidden_size, vision.hidden_size))
        self.proj = cells.Linear(config, (vision.hidden_size, vision.hidden_size))
        self.attention = cells.Attention(vision)

    def construct(self, rows, hidden_keys, cos, sin):
        """rows `[I*R, C]`; hidden_keys `[I, R]`, of the device's cells; cos and sin `[I*R, d]`."""
        size = self.window or hidden_keys.shape[1]
        groups = rows.shape[0] // size
        heads = ops.reshape(self.qkv(rows), (groups, size, 3, self.num_heads, self.head_dim))
        heads = ops.transpose(heads, (2, 0, 3, 1, 4))
        table = (groups, 1, size, self.head_dim)
        cos, sin = ops.reshape(cos, table), ops.reshape(sin, table)
        output = self.attention(heads, ops.reshape(hidden_keys, (groups, 1, 1, size)), cos, sin)
        return self.proj(ops.reshape(ops.transpose(output, (0, 2, 1, 3)), (-1, self.hidden_size)))


class GatedMlp(nn.Cell):
    """SwiGLU with biases."""

    def __init__(self, cells, config, vision: VisionDims):
        super().__init__()
        self.gate_proj = cells.Linear(config, (vision.intermediate_size, vision.hidden_size))
        self.up_proj = cells.Linear(config, (vision.intermediate_size, vision.hidden_size))
        self.down_proj = cells.Linear(config, (vision.hidden_size, vision.intermediate_size))

    def construct(self, rows):
        gate = self.gate_proj(rows)
        return self.down_proj(gate * ops.sigmoid(gate) * self.up_proj(rows))


class LayerNorm(nn.Cell):
    """Layer normalisation over the last axis, in float32 (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, config, dim: int, eps: float):
        super().__init__()
        self.weight = Parameter(initializer("ones", (dim,), config.params_dtype), name="weight")
        self.bias = Parameter(initializer("zeros", (dim,), config.params_dtype), name="bias")
        self.norm = ops.LayerNorm(-1, -1, eps)

    def construct(self, rows):
        weight, bias = ops.cast(self.weight, ms.float32), ops.cast(self.bias, ms.float32)
        return ops.cast(self.norm(ops.cast(rows, ms.float32), weight, bias)[0], rows.dtype)


class PlainMlp(nn.Cell):
    """Two projections with biases; between them GELU as x * sigmoid(1.702 x) (arXiv:1606.08415, section 2)."""

    def __init__(self, cells, config, vision: VisionDims):
        super().__init__()
        self.fc1 = cells.Linear(config, (vision.intermediate_size, vision.hidden_size))
        self.fc2 = cells.Linear(config, (vision.hidden_size, vision.intermediate_size))

    def construct(self, rows):
        rows = self.fc1(rows)
        return self.fc2(rows * ops.sigmoid(rows * 1.702))


class TanhMlp(nn.Cell):
    """Two projections with biases; between them GELU with the hyperbolic tangent (arXiv:1606.08415, section 2)."""

    def __init__(self, cells, config, vision: VisionDims):
        super().__init__()
        self.linear_fc1 = cells.Linear(config, (vision.intermediate_size, vision.hidden_size))
        self.linear_fc2 = cells.Linear(config, (vision.hidden_size, vision.intermediate_size))

    def construct(self, rows):
        wide = ops.cast(self.linear_fc1(rows), ms.float32)
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        return self.linear_fc2(ops.cast(0.5 * wide * (1.0 + ops.tanh(inner)), rows.dtype))


_MLPS = {"silu": GatedMlp, "quick_gelu": PlainMlp, "gelu_tanh": TanhMlp}


class Gelu(nn.Cell):
    """x * Phi(x) with the error function, as PyTorch's default: Hendrycks and Gimpel 2016, arXiv:1606.08415."""

    def construct(self, rows):
        wide = ops.cast(rows, ms.float32)
        return ops.cast(0.5 * wide * (1.0 + ops.erf(wide * 0.7071067811865476)), rows.dtype)


class Merger(nn.Cell):
    """Neighbouring patches, side by side, projected to one row of the decoder's width ``hidden_size``."""

    def __init__(self, cells, config, vision: VisionDims, hidden_size: int):
        super().__init__()
        self.width = vision.merged_size
        self.ln_q = _norm(cells, config, vision)
        self.mlp = nn.SequentialCell(
            cells.Linear(config, (self.width, self.width)), Gelu(), cells.Linear(config, (hidden_size, self.width))
        )

    def construct(self, rows):
        return self.mlp(ops.reshape(self.ln_q(rows), (-1, self.width)))


class DeepMerger(nn.Cell):
    """As :class:`Merger`, with Qwen3-VL's names; ``norm_size`` is the width of what is normalised, merged or not."""

    def __init__(self, cells, config, vision: VisionDims, hidden_size: int, norm_size: int):
        super().__init__()
        self.width, self.norm_size = vision.merged_size, norm_size
        self.norm = LayerNorm(config, norm_size, NORM_EPS)
        self.linear_fc1 = cells.Linear(config, (self.width, self.width))
        self.gelu = Gelu()
        self.linear_fc2 = cells.Linear(config, (hidden_size, self.width))

    def construct(self, rows):
        rows = ops.reshape(self.norm(ops.reshape(rows, (-1, self.norm_size))), (-1, self.width))
        return self.linear_fc2(self.gelu(self.linear_fc1(rows)))


def _norm(cells, config, vision: VisionDims) -> nn.Cell:
    return (cells.RmsNorm if vision.is_gated else LayerNorm)(config, vision.hidden_size, NORM_EPS)


def _rotary_tables(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines `[rows or columns, head_dim / 4]` of 2-D rotary positions, float32."""
    width = head_dim // 2
    frequencies = 1.0 / _ROTARY_BASE ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angles = np.outer(np.arange(_MAX_PATCHES, dtype=np.float32), frequencies).astype(np.float32)
    return np.cos(angles), np.sin(angles)
