"""Attention of Qwen3.5 on the CPU: by the gated delta rule (arXiv:2412.06464), or softmax with a gate behind it.

The mask of both is a pair: of softmax attention, and what :class:`mindrlhf.models.gated_delta.Ancestors` returns.
"""

from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer

from mindrlhf.models.cpu_cells import RmsNorm, SelfAttention, Weights
from mindrlhf.models.linear_attention import Gated, GatedDeltaHeads, Weight
from mindrlhf.specs import LinearDims


class GatedSelfAttention(SelfAttention):
    """Softmax attention with a gate, in a decoder that has linear attention too."""

    def __init__(self, config, layer_number: int, norm: type):
        super().__init__(config, layer_number, norm, gates_output=True)

    def construct(
        self, hidden_states, attention_mask=None, rotary_pos_emb=None, prefix_keys_values=None, actual_seq_len=None
    ):
        return super().construct(hidden_states, attention_mask[0], rotary_pos_emb)


class LinearAttention(nn.Cell):
    """Causal convolution, gated delta rule and gated norm; the interface of MindFormers' SelfAttention."""

    def __init__(self, config, layer_number: int, linear: LinearDims):
        super().__init__()
        del layer_number
        self.value_dim = linear.value_dim
        self.in_proj_qkv = Weights(config, (linear.conv_size, config.hidden_size), bias=False)
        self.conv1d = Weight(config, (linear.conv_size, 1, linear.conv_width), "normal")
        self.in_proj_z = Weights(config, (linear.value_size, config.hidden_size), bias=False)
        self.gates = Weights(config, (2 * linear.value_heads, config.hidden_size), bias=False)
        self.dt_bias = Parameter(initializer("ones", (linear.value_heads,), config.params_dtype), name="dt_bias")
        self.A_log = Parameter(initializer("ones", (linear.value_heads,), config.params_dtype), name="A_log")
        self.norm = RmsNorm(config, linear.value_dim, config.layernorm_epsilon)
        self.out_proj = Weights(config, (config.hidden_size, linear.value_size), bias=False)
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)
        self.heads, self.gated = GatedDeltaHeads(linear), Gated(is_silu=True)

    def construct(
        self, hidden_states, attention_mask=None, rotary_pos_emb=None, prefix_keys_values=None, actual_seq_len=None
    ):
        batch, _, _, length = attention_mask[0].shape
        relations, places = attention_mask[1]
        mixed = ops.reshape(self._product(hidden_states, self.in_proj_qkv), (batch, length, -1))
        gates = ops.reshape(self._product(hidden_states, self.gates), (batch, length, -1))
        output = self.heads(mixed, gates, self.conv1d.weight, self.dt_bias, self.A_log, relations, places)
        gate = self._product(hidden_states, self.in_proj_z)
        output = ops.reshape(self.norm(ops.reshape(output, (-1, self.value_dim))), gate.shape)
        return self._product(self.gated(output, gate), self.out_proj), None

    def _product(self, rows, weights: Weights):
        return weights(rows, self.matmul_transpose_b(rows, weights.weight))
