"""A layer with linear attention between its projections, on any device: arXiv:2412.06464, section 3.4."""

from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer

from mindrlhf.models.gated_delta import CausalConvolution, GatedDeltaRule, softplus
from mindrlhf.specs import LinearDims

# Beside the squares of a query or key, whose root it is divided by: transformers' l2norm.
_EPSILON = 1e-6


class GatedDeltaHeads(nn.Cell):
    """Causal convolution and gated delta rule, of all heads or of those of a rank."""

    def __init__(self, linear: LinearDims):
        super().__init__(auto_prefix=False)
        self.group_rows, self.key_dim, self.value_dim = linear.group_rows, linear.key_dim, linear.value_dim
        self.split = ops.auto_generate.SplitWithSize()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.convolve, self.rule = CausalConvolution(), GatedDeltaRule()

    def construct(self, mixed, gates, taps, dt_bias, log_decay, relations, places):
        """Return the outputs `[B, S, heads, dv]`; all is float32.

        Args:
            mixed: `[B, S, channels]`, by key head the query, the key, and the values that share them.
            gates: `[B, S, 2 * heads]`, by head of values the rate of learning and the step of decay, raw.
            taps: `[channels, 1, width]` of the convolution.
            dt_bias, log_decay: `[heads]`.
            relations, places: of :class:`mindrlhf.models.gated_delta.Ancestors`.
        """
        batch, length, channels = mixed.shape
        mixed = self.convolve(ops.reshape(mixed, (-1, channels)), taps, places)
        grouped = ops.reshape(mixed, (batch, length, -1, sum(self.group_rows)))
        query, key, value = self.split(grouped, self.group_rows, 3)
        value = ops.reshape(value, (batch, length, -1, self.value_dim))
        shape = value.shape[:3]
        rate, slope = self.split(ops.reshape(gates, (*shape, 2)), (1, 1), 3)
        slope = ops.reshape(slope, shape) + dt_bias
        # The logarithm of what stays of the state before a token, at most 0.
        decay = -ops.exp(log_decay) * softplus(slope)
        rate = ops.sigmoid(ops.reshape(rate, shape))
        query = self._unit(query) * self.key_dim**-0.5
        return self.rule(query, self._unit(key), value, decay, rate, relations)[0]

    def _unit(self, heads):
        return heads * ops.rsqrt(self.sum(heads * heads, -1) + _EPSILON)


class Gated(nn.Cell):
    """rows * sigmoid(gate), or rows * silu(gate), and its gradient, without which layers cannot be recomputed.

    MindSpore orders the operators of a recomputed layer by whole paths, and these are two that meet.
    """

    def __init__(self, is_silu: bool):
        super().__init__(auto_prefix=False)
        self.is_silu = is_silu

    def construct(self, rows, gate):
        share = ops.sigmoid(gate)
        return rows * (gate * share if self.is_silu else share)

    def bprop(self, rows, gate, out, dout):
        share = ops.sigmoid(gate)
        if self.is_silu:
            factor, slope = gate * share, share + gate * share * (1.0 - share)
        else:
            factor, slope = share, share * (1.0 - share)
        return dout * factor, dout * rows * slope


class Weight(nn.Cell):
    """Holds a weight of any shape under the name that it has in files."""

    def __init__(self, config, shape: tuple[int, ...], drawn: str):
        super().__init__()
        self.weight = Parameter(initializer(drawn, shape, config.params_dtype), name="weight")
