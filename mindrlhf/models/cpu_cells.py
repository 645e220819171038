"""CPU stand-ins for MindFormers' Ascend-only kernels, as sub-modules of its own decoder.

The parameters keep MindFormers' names and layouts (query/key/value grouped per key/value head, gate and up
rows alternating). Inside the decoder the hidden states are `[B*S, H]`, batch-major: attention is the only cell that
looks at positions, and it takes B and S from the mask.

Matrix multiplications take most of the time of a step; the rest is memory traffic. So gradients that need
fewer passes than autodiff makes are written out, and interleaved weights are re-ordered instead of the much larger
activations.
"""

import numpy as np
from mindformers.parallel_core.training_graph.transformer.transformer_block import TransformerBlockSubmodules
from mindformers.parallel_core.training_graph.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

HIDDEN_SCORE = -1e9


def decoder_spec(num_layers: int) -> TransformerBlockSubmodules:
    """The decoder of `num_layers` layers built from the cells below."""
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm, self_attention=SelfAttention, pre_mlp_layernorm=RmsNorm, mlp=GatedMlp
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RmsNorm)


class _RmsNormFunction(nn.Cell):
    """y = x / rms(x) * weight over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4), with its gradient."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps
        self.mean = ops.ReduceMean(keep_dims=True)
        self.sum = ops.ReduceSum()

    def construct(self, x, weight):
        inverse_rms = ops.rsqrt(self.mean(ops.square(x), -1) + self.eps)
        normalised = x * inverse_rms
        return normalised * weight, normalised, inverse_rms

    def bprop(self, x, weight, out, dout):
        _, normalised, inverse_rms = out
        dweight = self.sum(dout[0] * normalised, 0)
        dnormalised = dout[0] * weight
        dx = (dnormalised - normalised * self.mean(dnormalised * normalised, -1)) * inverse_rms
        return dx, dweight


class RmsNorm(nn.Cell):
    """RMSNorm over the last axis of any shape; the interface of MindFormers' norm cells."""

    def __init__(self, config, dim: int, eps: float):
        super().__init__()
        self.weight = Parameter(initializer("ones", (dim,), config.params_dtype), name="weight")
        self.function = _RmsNormFunction(eps)
        self.dim = dim

    def construct(self, x):
        rows, _, _ = self.function(ops.reshape(x, (-1, self.dim)), self.weight)
        return ops.reshape(rows, x.shape)


class _Weights(nn.Cell):
    """Holds the weight `[out, in]` and optional bias of a projection under MindFormers' names."""

    def __init__(self, config, shape: tuple[int, int], bias: bool):
        super().__init__()
        self.weight = Parameter(config.init_method(shape), name="weight")
        self.bias = Parameter(initializer("zeros", (shape[0],), config.params_dtype), name="bias") if bias else None


class _AttentionFunction(nn.Cell):
    """Softmax attention with grouped heads and its gradient.

    The row sums of dP * P in the softmax gradient are those of dO * O (Dao et al. 2022, arXiv:2205.14135, appendix B.2),
    which are S / head_dim times smaller.
    """

    def __init__(self):
        super().__init__()
        self.matmul = ops.BatchMatMul()
        self.matmul_transpose_b = ops.BatchMatMul(transpose_b=True)
        self.matmul_transpose_a = ops.BatchMatMul(transpose_a=True)
        self.softmax = ops.Softmax(-1)
        self.sum = ops.ReduceSum(keep_dims=True)

    def construct(self, query, key, value, mask):
        """query `[B, G, r*S, d]` (scaled), key and value `[B, G, S, d]`, mask `[B, G, r*S, S]` added to the scores."""
        weights = self.softmax(self.matmul_transpose_b(query, key) + mask)
        return self.matmul(weights, value), weights

    def bprop(self, query, key, value, mask, out, dout):
        output, weights = out
        doutput = dout[0]
        dvalue = self.matmul_transpose_a(weights, doutput)
        dscores = weights * (self.matmul_transpose_b(doutput, value) - self.sum(doutput * output, -1))
        return self.matmul(dscores, key), self.matmul_transpose_a(dscores, query), dvalue, ops.zeros_like(mask)


class SelfAttention(nn.Cell):
    """Grouped-query self-attention with rotary embedding; the interface of MindFormers' SelfAttention."""

    def __init__(self, config, layer_number: int):
        super().__init__()
        del layer_number
        self.num_groups = config.num_query_groups
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.head_dim = config.kv_channels
        self.hidden_size = config.hidden_size
        self.query_size = config.num_attention_heads * self.head_dim
        self.linear_qkv = _Weights(
            config, (self.query_size + 2 * self.num_groups * self.head_dim, self.hidden_size), config.add_qkv_bias
        )
        self.linear_proj = _Weights(config, (self.hidden_size, self.query_size), bias=False)
        self.has_bias = config.add_qkv_bias
        self.has_norms = config.qk_layernorm
        if self.has_norms:
            self.q_layernorm = RmsNorm(config, self.head_dim, config.layernorm_epsilon)
            self.k_layernorm = RmsNorm(config, self.head_dim, config.layernorm_epsilon)
        self.matmul = ops.MatMul()
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)
        self.bias_add = ops.BiasAdd()
        self.split_groups = ops.auto_generate.SplitWithSize()
        self.attention = _AttentionFunction()

    def _project(self, hidden_states):
        """hidden `[N, H]` -> query `[N, n*d]`, key and value `[N, G*d]`."""
        sizes = (self.heads_per_group * self.head_dim, self.head_dim, self.head_dim)
        group_size = (self.heads_per_group + 2) * self.head_dim
        weights = self.split_groups(
            ops.reshape(self.linear_qkv.weight, (self.num_groups, group_size, self.hidden_size)), sizes, 1
        )
        parts = ()
        for weight in weights:
            parts += (self.matmul_transpose_b(hidden_states, ops.reshape(weight, (-1, self.hidden_size))),)
        if self.has_bias:
            biases = self.split_groups(ops.reshape(self.linear_qkv.bias, (self.num_groups, group_size)), sizes, 1)
            biased = ()
            for part, bias in zip(parts, biases):
                biased += (self.bias_add(part, ops.reshape(bias, (-1,))),)
            parts = biased
        return parts

    def _rotate(self, heads, cos, sin, half_turn):
        """Rotary embedding of `[.., S, d]` (Su et al. 2021, arXiv:2104.09864, eq. 34), halves paired as Hugging Face does."""
        turned = ops.reshape(self.matmul(ops.reshape(heads, (-1, self.head_dim)), half_turn), heads.shape)
        return heads * cos + turned * sin

    def construct(
        self, hidden_states, attention_mask=None, rotary_pos_emb=None, prefix_keys_values=None, actual_seq_len=None
    ):
        batch, _, _, length = attention_mask.shape
        groups, repeats, head_dim = self.num_groups, self.heads_per_group, self.head_dim
        query, key, value = self._project(hidden_states)
        query = ops.reshape(query, (batch, length, groups * repeats, head_dim))
        key = ops.reshape(key, (batch, length, groups, head_dim))
        if self.has_norms:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        query = ops.transpose(query, (0, 2, 1, 3))
        key = ops.transpose(key, (0, 2, 1, 3))
        value = ops.transpose(ops.reshape(value, (batch, length, groups, head_dim)), (0, 2, 1, 3))
        cos, sin, scaled_cos, scaled_sin, half_turn = rotary_pos_emb
        query = self._rotate(query, scaled_cos, scaled_sin, half_turn)
        key = self._rotate(key, cos, sin, half_turn)
        query = ops.reshape(query, (batch, groups, repeats * length, head_dim))
        output, _ = self.attention(query, key, value, attention_mask)
        output = ops.reshape(output, (batch, groups * repeats, length, head_dim))
        output = ops.reshape(ops.transpose(output, (0, 2, 1, 3)), (-1, self.query_size))
        return self.matmul_transpose_b(output, self.linear_proj.weight), None


class _SwigluFunction(nn.Cell):
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202, eq. 6) and its gradient."""

    def construct(self, gate, up):
        sigmoid = ops.sigmoid(gate)
        activated = gate * sigmoid
        return activated * up, sigmoid, activated

    def bprop(self, gate, up, out, dout):
        _, sigmoid, activated = out
        dgate = dout[0] * up * (sigmoid + activated * (1.0 - sigmoid))
        return dgate, dout[0] * activated


class GatedMlp(nn.Cell):
    """SwiGLU feed-forward; the interface of MindFormers' MLP."""

    def __init__(self, config):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.ffn_hidden_size
        self.linear_fc1 = _Weights(config, (2 * self.intermediate_size, self.hidden_size), bias=False)
        self.linear_fc2 = _Weights(config, (self.hidden_size, self.intermediate_size), bias=False)
        self.matmul = ops.MatMul(transpose_b=True)
        self.split = ops.Split(0, 2)
        self.swiglu = _SwigluFunction()

    def construct(self, hidden_states, extra_loss=0.0):
        pairs = ops.reshape(self.linear_fc1.weight, (self.intermediate_size, 2, self.hidden_size))
        gate_weight, up_weight = self.split(ops.transpose(pairs, (1, 0, 2)))
        gate = self.matmul(hidden_states, ops.reshape(gate_weight, (self.intermediate_size, self.hidden_size)))
        up = self.matmul(hidden_states, ops.reshape(up_weight, (self.intermediate_size, self.hidden_size)))
        product, _, _ = self.swiglu(gate, up)
        return self.matmul(product, self.linear_fc2.weight), None, extra_loss


class DecoderInputs(nn.Cell):
    """What the CPU decoder needs: embedded tokens, the mask added to the scores, and the rotary tables."""

    def __init__(self, config, max_length: int, rope_theta: float):
        super().__init__()
        self.num_groups = config.num_query_groups
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.hidden_size = config.hidden_size
        cos, sin = rotary_tables(max_length, config.kv_channels, rope_theta)
        scale = config.kv_channels**-0.5
        self.tables = tuple(Tensor(table) for table in (cos, sin, cos * np.float32(scale), sin * np.float32(scale)))
        self.half_turn = Tensor(half_turn_matrix(config.kv_channels))
        self.causal = Tensor(np.triu(np.full((max_length, max_length), HIDDEN_SCORE, np.float32), k=1))

    def construct(self, input_ids, segment_ids, embedding):
        batch, length = input_ids.shape
        hidden_states = ops.reshape(ops.gather(embedding, input_ids, 0), (-1, self.hidden_size))
        other = ops.not_equal(ops.expand_dims(segment_ids, 2), ops.expand_dims(segment_ids, 1))
        mask = ops.minimum(ops.cast(other, self.causal.dtype) * HIDDEN_SCORE, self.causal[:length, :length])
        mask = ops.tile(ops.reshape(mask, (batch, 1, length, length)), (1, self.num_groups, self.heads_per_group, 1))
        tables = ()
        for table in self.tables:
            tables += (table[:length],)
        return hidden_states, mask, tables + (self.half_turn,)


def rotary_tables(length: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines `[length, head_dim]`, float32, of position * theta^(-2i/head_dim), both halves alike."""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies.astype(np.float32))
    angles = np.concatenate([angles, angles], axis=1)
    return np.cos(angles), np.sin(angles)


def half_turn_matrix(head_dim: int) -> np.ndarray:
    """Matrix R `[d, d]` with x @ R = (-x[d/2:], x[:d/2])."""
    half = np.eye(head_dim // 2, dtype=np.float32)
    return np.block([[np.zeros_like(half), half], [-half, np.zeros_like(half)]])
