"""Linear attention of Qwen3.5 on Ascend, sharded by heads: ranks compute theirs with plain operators, in float32."""

import mindspore as ms
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops.operations import Morph

from mindrlhf.models.ascend_layers import as_first, on_each_rank
from mindrlhf.models.gated_delta import Ancestors
from mindrlhf.models.linear_attention import Gated, GatedDeltaHeads, Weight
from mindrlhf.specs import CHUNK_TOKENS, LinearDims

_ROWS = ("cp", "dp", "tp")
_CHUNKS, _ROWS_OF_IDS = ("dp", "None", "None"), ("dp", "None")


class LinearAttention(nn.Cell):
    """In place of MindFormers' SelfAttention; the mask is what :class:`AncestorsOfRows` adds to it."""

    def __init__(self, config, layer_number: int, linear: LinearDims):
        super().__init__()
        del layer_number
        hidden, heads, bare = config.hidden_size, linear.value_heads, {"bias": False, "skip_bias_add": True}
        inputs = {"config": config, "init_method": config.init_method, **bare}
        self.in_proj_qkv = ColumnParallelLinear(hidden, linear.conv_size, **inputs)
        self.in_proj_z = ColumnParallelLinear(hidden, linear.value_size, **inputs)
        self.gates = ColumnParallelLinear(hidden, 2 * heads, **inputs)
        outputs = {"config": config, "init_method": config.output_layer_init_method, **bare}
        self.out_proj = RowParallelLinear(linear.value_size, hidden, **outputs)
        self.conv1d = Weight(config, (linear.conv_size, 1, linear.conv_width), "normal")
        self.norm = Weight(config, (linear.value_dim,), "ones")
        self.dt_bias = Parameter(initializer("ones", (heads,), config.params_dtype), name="dt_bias")
        self.A_log = Parameter(initializer("ones", (heads,), config.params_dtype), name="A_log")
        self.heads, self.gated = GatedDeltaHeads(linear), Gated(is_silu=True)
        self.cast, self.transpose = ops.Cast(), ops.Transpose()
        self.normed = ops.RmsNorm(config.layernorm_epsilon)
        weights = (("tp", "None", "None"), ("tp",), ("tp",), ("None",))
        axes = [*[_ROWS] * 3, *weights, *[_CHUNKS] * 4, _ROWS_OF_IDS]
        self.mix = on_each_rank(self._mix, as_first, axes, _ROWS)

    def construct(
        self, hidden_states, attention_mask, rotary_pos_emb=None, prefix_keys_values=None, actual_seq_len=None
    ):
        _, ancestors, takes, leaves, lives_on, places = attention_mask
        gate, mixed = self.in_proj_z(hidden_states)[0], self.in_proj_qkv(hidden_states)[0]
        gates = self.gates(hidden_states)[0]
        taps, norm = self.conv1d.weight, self.norm.weight
        rows = self.mix(
            gate, mixed, gates, taps, self.dt_bias, self.A_log, norm, ancestors, takes, leaves, lives_on, places
        )
        return self.out_proj(rows)

    # In what follows tensors are the shards of this rank, [S, B, channels].

    def _mix(self, gate, mixed, gates, taps, dt_bias, log_decay, norm, ancestors, takes, leaves, lives_on, places):
        mixed, gates = self._float32(self._turned(mixed)), self._float32(self._turned(gates))
        weights = self._float32(taps), self._float32(dt_bias), self._float32(log_decay)
        output = self.heads(mixed, gates, *weights, (ancestors, takes, leaves, lives_on), places)
        output = self.normed(output, self._float32(norm))[0]
        turned = self._float32(self._turned(gate))
        output = self.gated(ops.reshape(output, turned.shape), turned)
        return self.cast(self._turned(output), gate.dtype)

    def _turned(self, rows):
        return self.transpose(rows, (1, 0, 2))

    def _float32(self, array):
        return self.cast(array, ms.float32)


class AncestorsOfRows(nn.Cell):
    """Results of :class:`mindrlhf.models.gated_delta.Ancestors`, of the rows of each rank, in one tuple."""

    def __init__(self, linear: LinearDims):
        super().__init__(auto_prefix=False)
        self.ancestors, self.width = Ancestors(linear.conv_width), linear.conv_width
        axes = tuple(layout(*of_one) for of_one in (*[_CHUNKS] * 4, _ROWS_OF_IDS))
        self.of_segments, self.of_prompts = (
            Morph(function, shapes, _dtypes)
            .add_prim_attr("self_define_shard", True)
            .shard(in_strategy=(layout(*_ROWS_OF_IDS),) * num_inputs, out_strategy=axes)
            for function, shapes, num_inputs in (
                (self._of_segments, self._shapes, 1),
                (self._of_prompts, self._shapes_with_prompts, 2),
            )
        )

    def construct(self, segments, continued=None):
        """Of segments `[B, S]`, and the segments that they continue where prompts are shared."""
        return self.of_segments(segments) if continued is None else self.of_prompts(segments, continued)

    def _of_segments(self, segments):
        relations, places = self.ancestors(segments, segments, False)
        return (*relations, places)

    def _of_prompts(self, segments, continued):
        relations, places = self.ancestors(segments, continued, True)
        return (*relations, places)

    def _shapes(self, segments):
        return self._shapes_of(segments, 1)

    def _shapes_with_prompts(self, segments, continued):
        return self._shapes_of(segments, 2)

    def _shapes_of(self, segments, num_states: int):
        rows, length = segments
        count = rows * -(-length // CHUNK_TOKENS)
        states = [count, CHUNK_TOKENS, num_states]
        return [count, CHUNK_TOKENS, CHUNK_TOKENS], states, states, [count, 1, 1], [rows * length, self.width - 1]


def _dtypes(*_):
    return (ms.float32,) * 4 + (ms.int32,)
