"""Low-rank adapters in MindFormers' matrix products on Ascend, sharded as these are."""

import mindspore as ms
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallelLinear,
    func_infer_dtype,
    func_infer_shape,
)
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops.operations import Morph

from mindrlhf.errors import UserError
from mindrlhf.models.ascend_layers import GatedMLP, gate_then_up
from mindrlhf.models.lora.cpu_cells import own_part
from mindrlhf.specs import ModelDims
from mindrlhf.specs.lora import Adapter


class AdaptedLinear(nn.Cell):
    """A product of MindFormers, x W^T, with s (x A^T) B^T added on every rank before the ranks' parts are summed.

    A lies on the ranks as the columns of W, and B as its rows: so the product of their shards has the shape of W's
    shard, and adapters cost no communication but that of their gradients.

    Args:
        layer: MindFormers' cell.
        adapter: the rules of A and B.
        dims: of the model.
        scale: s, float32 [1]; 0 turns the adapter off.
        in_order: results have all of gate and then all of up, whose rows of W alternate.
    """

    def __init__(self, layer: nn.Cell, adapter: Adapter, dims: ModelDims, scale: Parameter, in_order: bool):
        super().__init__(auto_prefix=False)
        self.layer = layer
        self.down = _parameter(adapter.down, dims)
        self.up = _parameter(adapter.up, dims)
        self.scale = scale
        self.num_parts = len(adapter.base.hf_names)
        if self.num_parts > 1:
            # Of the first rows, of a group.
            groups = dims.num_kv_heads if adapter.base.transform == "qkv" else adapter.up.shape(dims)[0][0]
            whole = own_part(adapter.up, dims)
            self.own_part = ms.Tensor(whole[: len(whole) // groups])
        self.adds_bias = layer.has_bias and not layer.skip_bias_add
        self.compute_dtype = layer.compute_dtype
        is_row = isinstance(layer, RowParallelLinear)
        self.num_sums = layer.tp if is_row else 1
        self.divides_rows = is_row and layer.sequence_parallel and layer.tp > 1
        if self.num_sums > 1:
            self.sum = layer.reduce_scatter if self.divides_rows else layer.all_reduce
        self.in_order = in_order
        self.matmul = ops.MatMul(transpose_b=True)
        self.cast, self.transpose = ops.Cast(), ops.Transpose()
        function = self._product_with_bias if self.adds_bias else self._product
        self.product = Morph(function, func_infer_shape, func_infer_dtype).add_prim_attr("self_define_shard", True)
        inputs, weight, outputs = _axes(layer)
        parameters = [weight, ("None", weight[1]), (weight[0], "None"), ("None",)]
        if self.adds_bias:
            parameters.append((weight[0],))
        self.product.shard(
            in_strategy=tuple(layout(*axes) for axes in (inputs, *parameters)), out_strategy=(layout(*outputs),)
        )

    def construct(self, rows):
        """rows `[S, B, in]` -> `[S, B, out]`, and the bias that the caller adds, or None; as MindFormers' cells."""
        weight = self.cast(self.layer.weight, self.compute_dtype)
        if self.adds_bias:
            bias = self.cast(self.layer.bias, self.compute_dtype)
            return self.product(rows, weight, self.down, self.up, self.scale, bias), None
        return self.product(rows, weight, self.down, self.up, self.scale), self.layer.bias

    # In what follows tensors are the shards of this rank.

    def _product(self, inputs, weight, down, up, scale):
        return self._reshaped(self._summed(self._added(inputs, weight, down, up, scale)), inputs)

    def _product_with_bias(self, inputs, weight, down, up, scale, bias):
        return self._reshaped(self._summed(self._added(inputs, weight, down, up, scale)) + bias, inputs)

    def _added(self, inputs, weight, down, up, scale):
        rows = self.cast(ops.reshape(inputs, (-1, inputs.shape[-1])), self.compute_dtype)
        up = up * scale
        if self.num_parts > 1:
            # A row of B takes its own part of x A^T, which has those of all matrices side by side. To which matrix a
            # row belongs repeats itself from group to group, and a shard has whole groups.
            period, width = self.own_part.shape
            groups = ops.reshape(ops.tile(up, (1, self.num_parts)), (-1, period, width))
            up = ops.reshape(groups * self.own_part, (-1, width))
        if self.in_order:
            weight, up = gate_then_up(weight, self.transpose), gate_then_up(up, self.transpose)
        latent = self.matmul(rows, self.cast(down, self.compute_dtype))
        return self.matmul(rows, weight) + self.matmul(latent, self.cast(up, self.compute_dtype))

    def _summed(self, products):
        return products if self.num_sums == 1 else self.sum(products)

    def _reshaped(self, products, inputs):
        length = inputs.shape[0] // self.num_sums if self.divides_rows else inputs.shape[0]
        return self.cast(ops.reshape(products, (length, inputs.shape[1], products.shape[-1])), inputs.dtype)


def attach(parent: nn.Cell, name: str, adapter: Adapter, dims: ModelDims, scale: Parameter) -> AdaptedLinear:
    """Put an adapter into the product ``name`` of a cell.

    Raises:
        UserError: it is of a kind that has no adapters here.
    """
    layer = getattr(parent, name)
    if not isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
        raise UserError(
            f"{adapter.base.mf_name} has no adapters on Ascend: set 'lora.targets' to attention or mlp, or run.device "
            "to cpu"
        )
    names = [parameter.name for parameter in layer.get_parameters()]
    cell = AdaptedLinear(layer, adapter, dims, scale, isinstance(parent, GatedMLP) and name == "linear_fc1")
    if layer._has_config_recompute:
        cell._recompute(False, True)
    setattr(parent, name, cell)
    # Becoming a part of a cell has given them other names.
    for parameter, own_name in zip(layer.get_parameters(), names):
        parameter.name = own_name
    return cell


def _axes(layer: nn.Cell) -> tuple[tuple, tuple, tuple]:
    """The axes of ranks that split inputs, weight and outputs of a product, as MindFormers has them."""
    if isinstance(layer, SequenceParallelLinear):
        rows = (("cp", "tp"), "dp", "None")
        return rows, ("None", "None"), rows
    if isinstance(layer, RowParallelLinear):
        return ("cp", "dp", "tp"), ("None", "tp"), ("cp_tp" if layer.sequence_parallel else "cp", "dp", "None")
    return ("cp", "dp", "None"), ("tp", "None"), ("cp", "dp", "tp")


def _parameter(rule, dims: ModelDims) -> Parameter:
    # Filled in once a graph is compiled; until then there is no data.
    parameter = Parameter(initializer("zeros", rule.mf_shape(dims), ms.float32), name=rule.mf_name)
    parameter.parallel_optimizer = not rule.keeps_whole
    return parameter
