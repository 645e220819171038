"""CPU stand-ins for MindFormers' Ascend-only kernels in dense layers, as sub-modules of its own decoder.

The parameters keep MindFormers' names and layouts (query/key/value grouped per key/value head, gate and up
rows alternating). Inside the decoder the hidden states are `[B*S, H]`, batch-major: attention is the only cell that
looks at positions, and it takes B and S from the mask.

Matrix multiplications take most of the time of a step; the rest is memory traffic. So gradients that need
fewer passes than autodiff makes are written out, and interleaved weights are re-ordered instead of the much larger
activations.
"""

import math

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindrlhf.models.linear_attention import Gated


@ops.constexpr
def _exchanged_rows(blocks: int, rows: int, columns: int) -> Tensor:
    """The rows of `[blocks * rows * columns, d]` in the order of `[blocks, columns, rows]`."""
    places = np.arange(blocks * rows * columns, dtype=np.int32).reshape(blocks, rows, columns)
    return Tensor(places.swapaxes(1, 2).reshape(-1))


# 2u = linear * x + cubic * x^3 in gelu(x) = x * (1 + tanh(u)) / 2.
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = _GELU_LINEAR * 0.044715


class ExchangeAxes(nn.Cell):
    """`[A, M, N, d]` to `[A, N, M, d]`, and back in the gradient, as a gather of whole rows.

    MindSpore's kernel of transposition keeps 8 bytes for each element for as long as its graph is there, more than the
    activations of a layer, and takes longer.
    """

    def construct(self, x):
        return self._exchange(x)

    def bprop(self, x, out, dout):
        return (self._exchange(dout),)

    def _exchange(self, x):
        blocks, rows, columns, width = x.shape
        moved = ops.gather(ops.reshape(x, (-1, width)), _exchanged_rows(blocks, rows, columns), 0)
        return ops.reshape(moved, (blocks, columns, rows, width))


class _RmsNormFunction(nn.Cell):
    """y = x / rms(x) * weight on rows `[N, H]`, and its gradient.

    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4. With t = dy * x, the gradients are
    dx = dy * weight / rms - x * (t @ weight) / (H * rms^3) and dweight = (1 / rms) @ t.
    Broadcasts over rows are outer products: the CPU kernel for broadcast multiplication is several times slower.
    """

    def __init__(self, eps: float, dim: int):
        super().__init__()
        self.eps = eps
        self.dim = dim
        self.mean = ops.ReduceMean(keep_dims=True)
        self.matmul = ops.MatMul()
        self.matmul_transpose_a = ops.MatMul(transpose_a=True)
        self.ones_row = Tensor(np.ones((1, dim), np.float32))

    def construct(self, x, weight):
        inverse_rms = ops.rsqrt(self.mean(ops.square(x), -1) + self.eps)
        return x * self.matmul(inverse_rms, ops.reshape(weight, (1, self.dim))), inverse_rms

    def bprop(self, x, weight, out, dout):
        inverse_rms = out[1]
        products = dout[0] * x
        dweight = ops.reshape(self.matmul_transpose_a(inverse_rms, products), (self.dim,))
        slope = self.matmul(products, ops.reshape(weight, (self.dim, 1))) * (inverse_rms * inverse_rms * inverse_rms)
        direct = dout[0] * self.matmul(inverse_rms, ops.reshape(weight, (1, self.dim)))
        return direct - x * self.matmul(slope, self.ones_row * (1.0 / self.dim)), dweight


class RmsNorm(nn.Cell):
    """RMSNorm over the last axis of any shape; the interface of MindFormers' norm cells."""

    def __init__(self, config, dim: int, eps: float):
        super().__init__()
        self.weight = Parameter(initializer("ones", (dim,), config.params_dtype), name="weight")
        self.function = _RmsNormFunction(eps, dim)
        self.dim = dim

    def construct(self, x):
        rows, _ = self.function(ops.reshape(x, (-1, self.dim)), self.weight)
        return ops.reshape(rows, x.shape)


class ZeroCentredRmsNorm(RmsNorm):
    """The same with 1 + weight in the place of weight."""

    def __init__(self, config, dim: int, eps: float):
        super().__init__(config, dim, eps)
        self.weight.set_data(initializer("zeros", (dim,), config.params_dtype))

    def construct(self, x):
        rows, _ = self.function(ops.reshape(x, (-1, self.dim)), self.weight + 1.0)
        return ops.reshape(rows, x.shape)


class Weights(nn.Cell):
    """Holds the weight `[out, in]` and optional bias of a projection under MindFormers' names, and its adapter."""

    def __init__(self, config, shape: tuple[int, int], bias: bool):
        super().__init__()
        self.weight = Parameter(config.init_method(shape), name="weight")
        self.bias = Parameter(initializer("zeros", (shape[0],), config.params_dtype), name="bias") if bias else None
        self.adapter = None  # mindrlhf.models.lora.cpu_cells.LowRankAdapter

    def construct(self, rows, product):
        """Return the product `[N, out]` of rows `[N, in]` and the weight with what an adapter adds to it."""
        return product if self.adapter is None else product + self.adapter(rows)


class AttentionFunction(nn.Cell):
    """Softmax attention with grouped heads, and its gradient.

    The row sums of dP * P in the softmax gradient are those of dO * O, which is S / head_dim times smaller
    (Dao et al. 2022, arXiv:2205.14135, appendix B.2). A product with a matrix of ones both sums and broadcasts.
    """

    def __init__(self):
        super().__init__()
        self.ones = ops.Ones()
        self.row_matmul = ops.MatMul()
        self.matmul = ops.BatchMatMul()
        self.matmul_transpose_b = ops.BatchMatMul(transpose_b=True)
        self.matmul_transpose_a = ops.BatchMatMul(transpose_a=True)
        self.softmax = ops.Softmax(-1)

    def construct(self, query, key, value, mask):
        """query `[B, G, r*S, d]` (scaled), key and value `[B, G, S, d]`, mask `[B, G, r*S, S]` added to the scores."""
        weights = self.softmax(self.matmul_transpose_b(query, key) + mask)
        return self.matmul(weights, value), weights

    def bprop(self, query, key, value, mask, out, dout):
        output, weights = out
        doutput = dout[0]
        dvalue = self.matmul_transpose_a(weights, doutput)
        ones = self.ones((value.shape[-1], value.shape[-2]), value.dtype)
        sums = self.row_matmul(ops.reshape(doutput * output, (-1, value.shape[-1])), ones)
        dscores = weights * (self.matmul_transpose_b(doutput, value) - ops.reshape(sums, weights.shape))
        return self.matmul(dscores, key), self.matmul_transpose_a(dscores, query), dvalue, ops.zeros_like(mask)


class LinearFunction(nn.Cell):
    """x @ weight^T + bias on rows, and its gradient with the bias summed by a matrix product."""

    def __init__(self):
        super().__init__()
        self.matmul = ops.MatMul()
        self.matmul_transpose_a = ops.MatMul(transpose_a=True)
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)
        self.bias_add = ops.BiasAdd()
        self.ones = ops.Ones()

    def construct(self, x, weight, bias):
        return self.bias_add(self.matmul_transpose_b(x, weight), bias)

    def bprop(self, x, weight, bias, out, dout):
        dbias = self.matmul(self.ones((1, x.shape[0]), x.dtype), dout)
        return self.matmul(dout, weight), self.matmul_transpose_a(dout, x), ops.reshape(dbias, bias.shape)


class Linear(Weights):
    """A projection of rows with a bias."""

    def __init__(self, config, shape: tuple[int, int]):
        super().__init__(config, shape, bias=True)
        self.function = LinearFunction()

    def construct(self, rows):
        return self.function(rows, self.weight, self.bias)


class Rotate(nn.Cell):
    """Rotary embedding of `[.., S, d]`: x * cos + (x @ turn) * sin.

    Su et al. 2021, arXiv:2104.09864, eq. 34.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.matmul = ops.MatMul()

    def construct(self, heads, cos, sin, turn):
        turned = ops.reshape(self.matmul(ops.reshape(heads, (-1, self.dim)), turn), heads.shape)
        return heads * cos + turned * sin


class SelfAttention(nn.Cell):
    """Grouped-query self-attention with rotary embedding; the interface of MindFormers' SelfAttention.

    Args:
        gates_output: the projection has a gate behind each head's query, whose sigmoid the head's output is times.
    """

    def __init__(self, config, layer_number: int, norm: type = RmsNorm, gates_output: bool = False):
        super().__init__()
        del layer_number
        self.num_groups = config.num_query_groups
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.head_dim = config.kv_channels
        self.query_size = config.num_attention_heads * self.head_dim
        self.gates_output, self.num_queries = gates_output, self.heads_per_group * (2 if gates_output else 1)
        qkv_size = (self.num_queries + 2) * self.num_groups * self.head_dim
        self.linear_qkv = Weights(config, (qkv_size, config.hidden_size), config.add_qkv_bias)
        self.linear_proj = Weights(config, (config.hidden_size, self.query_size), bias=False)
        self.has_bias = config.add_qkv_bias
        self.has_norms = config.qk_layernorm
        if self.has_norms:
            self.q_layernorm = norm(config, self.head_dim, config.layernorm_epsilon)
            self.k_layernorm = norm(config, self.head_dim, config.layernorm_epsilon)
        self.gated = Gated(is_silu=False)
        self.linear = LinearFunction()
        self.rotate = Rotate(self.head_dim)
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)
        self.split_heads = ops.auto_generate.SplitWithSize()
        self.exchange_axes = ExchangeAxes()
        self.attention = AttentionFunction()

    def _project(self, hidden_states, batch: int, length: int):
        """hidden `[B*S, H]` -> query `[B, G, r, S, d]`, with gates 2 r; key and value `[B, G, 1, S, d]`."""
        if self.has_bias:
            heads = self.linear(hidden_states, self.linear_qkv.weight, self.linear_qkv.bias)
        else:
            heads = self.matmul_transpose_b(hidden_states, self.linear_qkv.weight)
        heads = self.linear_qkv(hidden_states, heads)
        heads = self.exchange_axes(ops.reshape(heads, (batch, length, -1, self.head_dim)))
        heads = ops.reshape(heads, (batch, self.num_groups, self.num_queries + 2, length, self.head_dim))
        return self.split_heads(heads, (self.num_queries, 1, 1), 2)

    def construct(
        self, hidden_states, attention_mask=None, rotary_pos_emb=None, prefix_keys_values=None, actual_seq_len=None
    ):
        batch, _, _, length = attention_mask.shape
        query, key, value = self._project(hidden_states, batch, length)
        gate = None
        if self.gates_output:
            by_turns = ops.reshape(query, (batch, self.num_queries * self.num_groups // 2, 2, length, self.head_dim))
            query, gate = self.split_heads(by_turns, (1, 1), 2)
            query = ops.reshape(query, (batch, self.num_groups, self.heads_per_group, length, self.head_dim))
        if self.has_norms:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        cos, sin, scaled_cos, scaled_sin, turn = rotary_pos_emb[:5]
        query = self.rotate(query, scaled_cos, scaled_sin, turn)
        key = self.rotate(key, cos, sin, turn)
        shared_shape = (batch, self.num_groups, length, self.head_dim)
        query = ops.reshape(query, (batch, self.num_groups, self.heads_per_group * length, self.head_dim))
        output, _ = self.attention(
            query, ops.reshape(key, shared_shape), ops.reshape(value, shared_shape), attention_mask
        )
        output = ops.reshape(output, (batch, self.num_groups * self.heads_per_group, length, self.head_dim))
        if self.gates_output:
            output = self.gated(output, ops.reshape(gate, output.shape))
        output = ops.reshape(self.exchange_axes(output), (-1, self.query_size))
        return self.linear_proj(output, self.matmul_transpose_b(output, self.linear_proj.weight)), None


@ops.constexpr
def _every_second_row(first: int, num_rows: int) -> Tensor:
    return Tensor(np.arange(first, num_rows, 2, dtype=np.int32))


class Silu(nn.Cell):
    """silu(gate) * up, and its gradient: the activation of SwiGLU."""

    def __init__(self):
        super().__init__()
        self.lerp = ops.Lerp()

    def construct(self, gate, up):
        """Return silu(gate); the product; and the derivative of the product with respect to the gate."""
        sigmoid = ops.sigmoid(gate)
        activated = gate * sigmoid
        product = activated * up
        # silu'(g) = sigmoid(g) + silu(g) * (1 - sigmoid(g)).
        slope = self.lerp(product, up, sigmoid)  # product + sigmoid * (up - product), in one pass over memory
        return activated, product, slope

    def product(self, gate, up):
        """The product alone, for autodiff."""
        return gate * ops.sigmoid(gate) * up


class TanhGelu(nn.Cell):
    """The same of GeGLU, by the tanh approximation of GELU: Hendrycks and Gimpel, arXiv:1606.08415, section 2.

    (1 + tanh(u)) / 2 = sigmoid(2u): MindSpore's CPU kernel of tanh is wrong by up to 1e-4.
    """

    def construct(self, gate, up):
        """See :class:`Silu`."""
        squares = gate * gate
        share = ops.sigmoid(gate * (squares * _GELU_CUBIC + _GELU_LINEAR))
        activated = gate * share
        slope = share + activated * (1.0 - share) * (squares * (3 * _GELU_CUBIC) + _GELU_LINEAR)
        return activated, activated * up, slope * up

    def product(self, gate, up):
        """See :class:`Silu`."""
        return gate * ops.sigmoid(gate * (gate * gate * _GELU_CUBIC + _GELU_LINEAR)) * up


_ACTIVATIONS = {"silu": Silu, "gelu": TanhGelu}


class _GatedMlpFunction(nn.Cell):
    """(act(x @ gate^T) * (x @ up^T)) @ down^T on rows `[N, H]`, and its gradient; gate and up rows alternate.

    Shazeer 2020, arXiv:2002.05202, eq. 6.
    """

    def __init__(self, activation: nn.Cell):
        super().__init__()
        self.activation = activation
        self.matmul = ops.MatMul()
        self.matmul_transpose_a = ops.MatMul(transpose_a=True)
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)
        self.split_rows = SplitRows()
        self.concat = ops.Concat(1)

    def construct(self, x, pairs, down_weight):
        gate_weight, up_weight = self.split_rows(pairs)
        gate = self.matmul_transpose_b(x, gate_weight)
        up = self.matmul_transpose_b(x, up_weight)
        activated, product, slope = self.activation(gate, up)
        return self.matmul_transpose_b(product, down_weight), activated, product, slope

    def bprop(self, x, pairs, down_weight, out, dout):
        # Three arrays wait for the backward pass, the fewest from which it has nothing to compute again. The weights
        # are copied again, or the copies of the forward pass would wait too: by numbers of rows that depend on the
        # gradient, since the compiler copies a whole parameter once more where that itself is made to wait.
        _, activated, product, slope = out
        gate_weight, up_weight = (
            ops.gather(pairs, ops.depend(_every_second_row(first, pairs.shape[0]), dout[0]), 0) for first in (0, 1)
        )
        dproduct = self.matmul(dout[0], down_weight)
        dup = dproduct * activated
        dgate = dproduct * slope
        shape = (down_weight.shape[1], 1, x.shape[1])
        dgate_weight = ops.reshape(self.matmul_transpose_a(dgate, x), shape)
        dup_weight = ops.reshape(self.matmul_transpose_a(dup, x), shape)
        return (
            self.matmul(dgate, gate_weight) + self.matmul(dup, up_weight),
            ops.reshape(self.concat((dgate_weight, dup_weight)), pairs.shape),
            self.matmul_transpose_a(dout[0], product),
        )


class SplitRows(nn.Cell):
    """The even and the odd rows of `[2 * I, H]`, copied."""

    def __init__(self):
        super().__init__()
        self.split = ops.Split(1, 2)

    def construct(self, pairs):
        size, width = pairs.shape[0] // 2, pairs.shape[1]
        even, odd = self.split(ops.reshape(pairs, (size, 2, width)))
        return ops.reshape(even, (size, width)), ops.reshape(odd, (size, width))


class GatedMlp(nn.Cell):
    """SwiGLU or GeGLU feed-forward; the interface of MindFormers' MLP."""

    def __init__(self, config, intermediate_size: int | None = None):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.intermediate_size = intermediate_size or config.ffn_hidden_size
        self.linear_fc1 = Weights(config, (2 * self.intermediate_size, self.hidden_size), bias=False)
        self.linear_fc2 = Weights(config, (self.hidden_size, self.intermediate_size), bias=False)
        self.split_rows = SplitRows()
        self.activation = _ACTIVATIONS[config.hidden_act]()
        self.function = _GatedMlpFunction(self.activation)
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)

    def construct(self, hidden_states, extra_loss=0.0):
        if self.linear_fc1.adapter is not None:
            gate_weight, up_weight = self.split_rows(self.linear_fc1.weight)
            return self._adapted(hidden_states, gate_weight, up_weight), None, extra_loss
        outputs = self.function(hidden_states, self.linear_fc1.weight, self.linear_fc2.weight)
        return outputs[0], None, extra_loss

    def _adapted(self, rows, gate_weight, up_weight):
        """The same with adapters: no gradients of weights, so autodiff passes no more often than necessary."""
        added_to_gate, added_to_up = self.linear_fc1.adapter(rows)
        gate = self.matmul_transpose_b(rows, gate_weight) + added_to_gate
        up = self.matmul_transpose_b(rows, up_weight) + added_to_up
        product = self.activation.product(gate, up)
        return self.linear_fc2(product, self.matmul_transpose_b(product, self.linear_fc2.weight))
