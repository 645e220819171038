"""Low-rank adapters as graph cells: what they add to a product with a matrix that stays as it is."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn, ops

from mindrlhf.specs import ModelDims, ParameterRule
from mindrlhf.specs.fuse import fuse
from mindrlhf.specs.lora import Adapter


class LowRankAdapter(nn.Cell):
    """s (x A^T) B^T on rows `[N, in]`: `[N, out]`, in the order of the rows of a fused parameter.

    Args:
        adapter: the rules of A and B.
        dims: of the model.
        scale: s, `[1]`; 0 turns the adapter off.
    """

    def __init__(self, adapter: Adapter, dims: ModelDims, scale: Parameter):
        super().__init__(auto_prefix=False)
        self.down = _parameter(adapter.down, dims)
        self.up = _parameter(adapter.up, dims)
        self.scale = scale
        self.num_parts = len(adapter.base.hf_names)
        if self.num_parts > 1:
            self.own_part = ms.Tensor(own_part(adapter.up, dims))
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)

    def construct(self, rows):
        """rows `[N, in]` -> `[N, out]`."""
        up = self.up * self.scale
        if self.num_parts > 1:
            # A row of B takes its own part of x A^T, which has those of all matrices side by side.
            up = ops.tile(up, (1, self.num_parts)) * self.own_part
        return self.matmul_transpose_b(self.matmul_transpose_b(rows, self.down), up)


class GateUpAdapter(nn.Cell):
    """The adapters of the two first matrices of a gated MLP: rows `[N, H]` -> `[N, I]` each.

    Their rows alternate in the fused B, which is far smaller than what it is multiplied with, so it is what is
    re-ordered.
    """

    def __init__(self, adapter: Adapter, dims: ModelDims, scale: Parameter):
        super().__init__(auto_prefix=False)
        self.down = _parameter(adapter.down, dims)
        self.up = _parameter(adapter.up, dims)
        self.scale = scale
        rows, self.rank = adapter.up.mf_shape(dims)
        self.size = rows // 2
        self.shares_latent = len(adapter.base.hf_names) == 1  # both are halves of one matrix
        self.split_latent = ops.Split(1, 2)
        self.split_up = ops.Split(0, 2)
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)

    def construct(self, rows):
        """rows `[N, H]` -> what to add to the gate and to the up projection, `[N, I]` each."""
        latent = self.matmul_transpose_b(rows, self.down)
        pairs = ops.transpose(ops.reshape(self.up * self.scale, (self.size, 2, self.rank)), (1, 0, 2))
        gate_up, up_up = self.split_up(ops.reshape(pairs, (2 * self.size, self.rank)))
        gate, up = (latent, latent) if self.shares_latent else self.split_latent(latent)
        return self.matmul_transpose_b(gate, gate_up), self.matmul_transpose_b(up, up_up)


def _parameter(rule, dims: ModelDims) -> Parameter:
    # Filled in when the weights are loaded.
    return Parameter(ms.Tensor(np.zeros(rule.mf_shape(dims), np.float32)), name=rule.mf_name)


def own_part(up: ParameterRule, dims: ModelDims) -> np.ndarray:
    """Return float32 [out, parts * rank]: 1 where rows of ``up``, a fused B, and of the stacked A are of one matrix."""
    shapes = up.shape(dims)
    part = fuse(up, dims, [np.full((rows, 1), index) for index, (rows, _) in enumerate(shapes)])
    return (part == np.repeat(np.arange(len(shapes)), shapes[0][1])).astype(np.float32)
