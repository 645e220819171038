"""Cells of a vision tower on Ascend: fused kernels in the compute dtype, norms and rotation in float32.

Each rank of the first pipeline stage runs the tower by itself, on the images of its rows and outside the sharded graph:
it is frozen, so there is nothing to exchange.
"""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindrlhf.models.context import by_itself
from mindrlhf.specs import VisionDims


class Linear(nn.Cell):
    """A projection of rows with a bias."""

    def __init__(self, config, shape: tuple[int, int]):
        super().__init__()
        self.weight = Parameter(config.init_method(shape), name="weight")
        self.bias = Parameter(initializer("zeros", shape[:1], config.params_dtype), name="bias")
        self.matmul = ops.MatMul(transpose_b=True)
        self.dtype = config.compute_dtype

    def construct(self, rows):
        return self.matmul(rows, ops.cast(self.weight, self.dtype)) + ops.cast(self.bias, self.dtype)


class RmsNorm(nn.Cell):
    """RMSNorm over the last axis."""

    def __init__(self, config, dim: int, eps: float):
        super().__init__()
        self.weight = Parameter(initializer("ones", (dim,), config.params_dtype), name="weight")
        self.norm = ops.RmsNorm(eps)

    def construct(self, rows):
        normalised, _ = self.norm(ops.cast(rows, ms.float32), ops.cast(self.weight, ms.float32))
        return ops.cast(normalised, rows.dtype)


class HiddenKeys(nn.Cell):
    """Mask of hidden keys, `[I, R]` uint8, from where patches are, `[I, R]`."""

    def construct(self, is_patch):
        return ops.cast(1.0 - is_patch, ms.uint8)


class Attention(nn.Cell):
    """The fused kernel over rotated queries and keys; see the cell of the same name for the CPU."""

    def __init__(self, vision: VisionDims):
        super().__init__()
        self.half = vision.head_dim // 2
        self.attention = ops.operations.nn_ops.FlashAttentionScore(
            head_num=vision.num_heads, scale_value=vision.head_dim**-0.5, input_layout="BNSD"
        )

    def construct(self, heads, hidden_keys, cos, sin):
        query, key = self._rotate(heads[0], cos, sin), self._rotate(heads[1], cos, sin)
        mask = ops.tile(hidden_keys, (1, 1, hidden_keys.shape[3], 1))
        return self.attention(query, key, heads[2], None, None, None, mask)[3]

    def _rotate(self, heads, cos, sin):
        rows = ops.cast(heads, ms.float32)
        turned = ops.concat((-rows[:, :, :, self.half :], rows[:, :, :, : self.half]), 3)
        return ops.cast(rows * cos + turned * sin, heads.dtype)


class ByItself:
    """A cell that each rank compiles and runs by itself, however the graphs of training are sharded.

    Args:
        cell: has no operators with strategies.
    """

    def __init__(self, cell: nn.Cell):
        self.cell = cell

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what the cell returns for this rank's inputs."""
        with by_itself():
            return self.cell(*inputs)
