"""Fused kernels in the place of what MindFormers' decoder layers (1.9.0) are made of on Ascend."""

import copy
from dataclasses import replace

import mindspore as ms
from mindformers.parallel_core.training_graph.base_models.common.embeddings.rope_utils import ApplyRotaryPosEmb
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mindformers.parallel_core.training_graph.transformer.mlp import MLP, MLPInterleaved
from mindformers.parallel_core.training_graph.transformer.moe.shared_experts import SharedExpertMLPInterleaved
from mindformers.parallel_core.training_graph.transformer.norm import FusedNorm, FusedRMSNorm
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindspore import nn, ops
from mindspore.ops.auto_generate.gen_ops_prim import RotaryPositionEmbedding, Swiglu
from mindspore.ops.operations import Morph

_HALVES = 0  # aclnnRotaryPositionEmbedding's mode: channel i and i + D / 2 are a pair


def with_fused_kernels(spec, config):
    """Return the decoder's specification with the norms and gated MLPs of this module."""
    spec.layer_norm = _fused(spec.layer_norm, config)
    spec.layer_specs = [_fused(layer, config) for layer in spec.layer_specs]
    return spec


def _fused(spec, config):
    if spec is FusedNorm:
        return RMSNorm
    if not isinstance(spec, ModuleSpec):
        return spec
    parts = vars(spec.submodules) if spec.submodules is not None else {}
    parts = {name: _fused(part, config) for name, part in parts.items()}
    is_gated = config.gated_linear_unit and config.hidden_act in ("silu", "gelu") and not config.add_bias_linear
    module = _GATED.get(spec.module, spec.module) if is_gated else spec.module
    return replace(spec, module=module, submodules=replace(spec.submodules, **parts) if parts else spec.submodules)


class RMSNorm(FusedRMSNorm):
    """MindFormers' norm without casts: of bfloat16 rows and a float32 weight the kernel computes in float32."""

    def construct(self, x):
        """Return the norm of x, in its dtype."""
        return self.norm(x, self.weight)[0]


class GatedMLP(MLP):
    """MindFormers' gated MLP, whose fused parameter has gate and up by turns, with one kernel for both activations.

    A rank brings the rows of its weight in order, gate first, so that no activation is taken apart channel by channel:
    a weight has fewer elements, a row of it is contiguous, and files keep their layout whatever the ranks.
    """

    weight_axes, channel_axes = ("tp", "None"), ("cp", "dp", "tp")

    def __init__(self, config, submodules, **options):
        super().__init__(config, submodules, **options)
        self.cast, self.after, self.transpose, self.swiglu = ops.Cast(), ops.Depend(), ops.Transpose(), Swiglu()
        self.is_gathered = ms.get_auto_parallel_context("enable_parallel_optimizer")
        self.gelu = ops.GeLU() if config.hidden_act == "gelu" else None  # by its tanh approximation
        self.in_order = on_each_rank(self._in_order, as_first, [self.weight_axes], self.weight_axes)
        self.activate = on_each_rank(self._activate, _half, [self.channel_axes], self.channel_axes)

    def construct(self, hidden_states, per_token_scale=None, extra_loss=0.0):
        """See MindFormers' cell."""
        output, bias = self.linear_fc2(self.activate(self._gate_and_up(hidden_states)))
        return output, bias, extra_loss

    def shard(self, config):
        """Nothing: what it would shard is not used."""

    def _gate_and_up(self, hidden_states):
        if hasattr(self.linear_fc1, "down"):
            return self.linear_fc1(hidden_states)[0]  # an adapter, which brings both products in order
        weight = self.linear_fc1.weight
        # It waits for the layer's input, or those of all layers would be put in order first. MindSpore reduces its
        # gradient in the dtype of what is waited with, and gathers it in that dtype where the optimizer shards it.
        if self.is_gathered:
            weight = self.after(self.cast(weight, self.compute_dtype), hidden_states)
        else:
            weight = self.cast(self.after(weight, hidden_states), self.compute_dtype)
        return self.linear_fc1(hidden_states, self.in_order(weight))[0]

    def _in_order(self, weight):
        return gate_then_up(weight, self.transpose)

    def _activate(self, both):
        if self.gelu is None:
            return self.swiglu(both, -1)
        gate, up = ops.split(both, both.shape[-1] // 2, -1)
        return self.gelu(gate) * up


class GatedSharedMLP(GatedMLP):
    """The same of experts that see every token: ranks share the rows, and their weights are whole."""

    weight_axes, channel_axes = ("None", "None"), (("cp", "tp"), "dp", "None")

    def __init__(self, config, submodules):
        config = copy.copy(config)
        config.ffn_hidden_size = config.moe_shared_expert_intermediate_size
        super().__init__(config, submodules)

    def construct(self, hidden_states):
        """See MindFormers' cell."""
        return self.linear_fc2(self.activate(self._gate_and_up(hidden_states)))


def gate_then_up(weight, transpose):
    """Rows of gate and up by turns [2F, width] as all of gate and then all of up."""
    size, width = weight.shape
    by_turns = ops.reshape(weight, (size // 2, 2, width))
    return ops.reshape(transpose(by_turns, (1, 0, 2)), (size, width))


def keep_prepared_weights(model) -> None:
    """Have the weights of recomputed layers cast and brought in order once a call, not again in the backward pass.

    MindSpore casts the shard of a sharded optimiser before it gathers it, so that what is kept is half of what it
    would gather and keep else.
    """
    for _, cell in model.decoder.cells_and_names():
        if isinstance(cell, (ColumnParallelLinear, RowParallelLinear, GatedMLP)):
            cell.cast.recompute(False)
        if isinstance(cell, GatedMLP):
            cell.transpose.recompute(False)


class Rotation(nn.Cell):
    """MindFormers' ApplyRotaryPosEmb in one kernel, of cosines and sines that all layers share.

    Args:
        is_key: of latent attention, one head for all ranks.
        by_row: every row has angles of its own.
    """

    def __init__(self, is_key: bool, by_row: bool):
        super().__init__()
        heads = ("cp", "dp", "None" if is_key else "tp", "None")
        angles = ("cp", "dp" if by_row else "None", "None", "None")
        self.cast = ops.Cast()
        self.rotate = _sharded(RotaryPositionEmbedding(), (heads, angles, angles), heads)
        self.slice = _sharded(ops.StridedSlice(), (heads,), heads)
        self.concat = ops.Concat(-1).add_prim_attr("self_define_shard", True)
        self.concat.shard(in_strategy=((layout(*heads), layout(*heads)),), out_strategy=(layout(*heads),))

    def construct(self, rows, tables, rotary_interleaved=False, multi_latent_attention=False):
        """Rotate rows [S, B, N, D], or their first channels, by tables [S, 1 or B, 1, D']."""
        cosines, sines = tables[0], tables[1]
        size, others = cosines.shape[-1], None
        if size < rows.shape[-1]:
            others = self._channels(rows, size, rows.shape[-1], 1)
            rows = self._channels(rows, 0, size, 1)
        dtype = rows.dtype
        if multi_latent_attention:
            # Neighbours are a pair: of queries and keys alike they may lie in halves from here on.
            rows = self.concat((self._channels(rows, 0, size, 2), self._channels(rows, 1, size, 2)))
        rows = self.cast(self.rotate(self.cast(rows, cosines.dtype), cosines, sines, _HALVES), dtype)
        return rows if others is None else self.concat((rows, others))

    def _channels(self, rows, start, stop, step):
        return self.slice(rows, (0, 0, 0, start), (*rows.shape[:3], stop), (1, 1, 1, step))


def fuse_rotation(model, by_row: bool) -> None:
    """Give the attention cells of a GPTModel cells that take cosines and sines, and the model what makes them.

    Args:
        by_row: every row has angles of its own.
    """
    for _, cell in model.decoder.cells_and_names():
        for name, part in cell.name_cells().items():
            if isinstance(part, ApplyRotaryPosEmb):
                setattr(cell, name, Rotation(part.for_k_pos_emb, by_row))
    model.rotary_tables = RotaryTables(by_row)


class RotaryTables(nn.Cell):
    """Cosines and sines of the angles [S, 1 or B, 1, D] that MindFormers' rotary cells return before a factor of 1."""

    def __init__(self, by_row: bool):
        super().__init__(auto_prefix=False)
        axes = ("cp", "dp" if by_row else "None", "None", "None")
        self.cos, self.sin = (_sharded(one, [axes], axes) for one in (ops.Cos(), ops.Sin()))

    def construct(self, rotary):
        """Return float32 tables, and what came behind the factor."""
        return (self.cos(rotary[0]), self.sin(rotary[0]), *rotary[2:])


def on_each_rank(function, infer_shape, inputs, output) -> Morph:
    """Return the operator that runs ``function`` on the shards of each rank; ``inputs`` and ``output`` name axes."""
    return _sharded(Morph(function, infer_shape, as_first), inputs, output)


def _sharded(operator, inputs, output):
    operator.add_prim_attr("self_define_shard", True)
    return operator.shard(in_strategy=tuple(layout(*axes) for axes in inputs), out_strategy=(layout(*output),))


def as_first(first, *others):
    """Shape or dtype of an operator's output that is its first input's."""
    return first


def _half(shape):
    return [*shape[:-1], shape[-1] // 2]


_GATED = {MLPInterleaved: GatedMLP, SharedExpertMLPInterleaved: GatedSharedMLP}
