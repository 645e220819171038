"""Attention of Qwen3.5 on the CPU: by the gated delta rule (arXiv:2412.06464), or softmax with a gate behind it.

The mask of both is a pair: of softmax attention, and what :class:`mindrlhf.models.gated_delta.Ancestors` returns.
"""

from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer

from mindrlhf.models.cpu_cells import Gated, RmsNorm, SelfAttention, Weights
from mindrlhf.models.gated_delta import CausalConvolution, GatedDeltaRule, softplus
from mindrlhf.specs import LinearDims

# Beside the squares of a query or key, whose root it is divided by: transformers' l2norm.
_EPSILON = 1e-6


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
        self.linear, self.value_dim = linear, linear.value_dim
        self.in_proj_qkv = Weights(config, (linear.conv_size, config.hidden_size), bias=False)
        self.conv1d = Taps(config, linear)
        self.in_proj_z = Weights(config, (linear.value_size, config.hidden_size), bias=False)
        self.gates = Weights(config, (2 * linear.value_heads, config.hidden_size), bias=False)
        self.dt_bias = Parameter(initializer("ones", (linear.value_heads,), config.params_dtype), name="dt_bias")
        self.A_log = Parameter(initializer("ones", (linear.value_heads,), config.params_dtype), name="A_log")
        self.norm = RmsNorm(config, linear.value_dim, config.layernorm_epsilon)
        self.out_proj = Weights(config, (config.hidden_size, linear.value_size), bias=False)
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)
        self.split = ops.auto_generate.SplitWithSize()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.convolve, self.rule, self.gated = CausalConvolution(), GatedDeltaRule(), Gated(is_silu=True)

    def construct(
        self, hidden_states, attention_mask=None, rotary_pos_emb=None, prefix_keys_values=None, actual_seq_len=None
    ):
        batch, _, _, length = attention_mask[0].shape
        relations, places = attention_mask[1]
        linear = self.linear
        mixed = self.convolve(self._product(hidden_states, self.in_proj_qkv), self.conv1d.weight, places)
        grouped = ops.reshape(mixed, (batch, length, linear.key_heads, sum(linear.group_rows)))
        query, key, value = self.split(grouped, linear.group_rows, 3)
        value = ops.reshape(value, (batch, length, linear.value_heads, self.value_dim))
        rate, decay = self._gates(hidden_states, (batch, length, linear.value_heads))
        query = self._unit(query) * linear.key_dim**-0.5
        output, _ = self.rule(query, self._unit(key), value, decay, rate, relations)
        gate = self._product(hidden_states, self.in_proj_z)
        output = ops.reshape(self.norm(ops.reshape(output, (-1, self.value_dim))), gate.shape)
        return self._product(self.gated(output, gate), self.out_proj), None

    def _product(self, rows, weights: Weights):
        return weights(rows, self.matmul_transpose_b(rows, weights.weight))

    def _gates(self, rows, shape):
        """The rate of learning each token, from 0 to 1, and the logarithm of what stays before it, at most 0."""
        rate, slope = self.split(ops.reshape(self._product(rows, self.gates), (*shape, 2)), (1, 1), 3)
        slope = ops.reshape(slope, shape) + self.dt_bias
        return ops.sigmoid(ops.reshape(rate, shape)), -ops.exp(self.A_log) * softplus(slope)

    def _unit(self, heads):
        return heads * ops.rsqrt(self.sum(heads * heads, -1) + _EPSILON)


class Taps(nn.Cell):
    """Holds the weight `[channels, 1, width]` of the convolution."""

    def __init__(self, config, linear: LinearDims):
        super().__init__()
        shape = (linear.conv_size, 1, linear.conv_width)
        self.weight = Parameter(initializer("normal", shape, config.params_dtype), name="weight")
