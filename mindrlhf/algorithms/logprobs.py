"""Token log-probabilities and entropy from hidden states: graph cells."""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from mindrlhf.algorithms.head_shard import HeadShard, TiledHeadShard
from mindrlhf.cpu.training.heads import TiledTokenLogProbs


class GraphTokenLogProbs(nn.Cell):
    """The form that Ascend compiles.

    Under semi-auto parallel the vocabulary stays split over the model-parallel ranks: what they exchange is, per token,
    sums over the vocabulary, never logits or weights (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

    Args:
        weight: output projection [vocabulary, width].
        splits: ranks that share the rows, each row, and the vocabulary.
        tile: positions of a rank whose logits exist at a time; 0 means all.
    """

    def __init__(self, weight: ms.Parameter, splits: tuple[int, int, int] = (1, 1, 1), tile: int = 0):
        super().__init__(auto_prefix=False)
        self.weight = weight
        parts, token = (splits,), ((*splits[:2], 1),)
        tokens = (splits[:2],)
        self.cast = ops.Cast()
        part = weight.shape[0] // splits[2]
        self.first_rows = ms.Tensor(np.arange(splits[2], dtype=np.int32) * part)
        self.head_shard = HeadShard(in_place=max(splits) > 1)
        self.tiles = TiledHeadShard(self.head_shard, tile) if tile else None
        self.on_each_rank = self._local
        if max(splits) > 1:
            self.on_each_rank = _on_each_rank(self._local, splits[2])
        self.column = ops.StridedSlice().shard(((*splits, 1),))
        self.squeeze_column = ops.Squeeze(-1).shard(((*splits, 1),))
        self.max = ops.ReduceMax(keep_dims=True).shard(parts)
        self.subtract = ops.Sub().shard(parts + token)
        self.exp = ops.Exp().shard(parts)
        self.sum = ops.ReduceSum(keep_dims=True).shard(parts)
        self.log = ops.Log().shard(token)
        self.multiply = ops.Mul().shard(parts + parts)
        self.divide = ops.RealDiv().shard(token + token)
        self.add_tokens = ops.Add().shard(token + token)
        self.subtract_tokens = ops.Sub().shard(token + token)
        self.squeeze = ops.Squeeze(-1).shard(token)
        self.mask = ops.Mul().shard(tokens + tokens)

    def construct(self, hidden, labels, mask):
        """Return log-probabilities and entropies, float32 [rows, length] each, 0 where ``mask`` is 0.

        ``hidden`` is [rows, length, width]; ``labels`` int32 and ``mask`` float32 [rows, length].
        """
        weight = self.cast(self.weight, hidden.dtype)
        # Of each rank's part of the vocabulary, [rows, length, parts, 3].
        statistics = self.on_each_rank(hidden, weight, labels, self.first_rows)
        log_sums = self._statistic(statistics, 0)
        highest = ops.stop_gradient(self.max(log_sums, -1))
        shares = self.exp(self.subtract(log_sums, highest))
        total = self.sum(shares, -1)
        log_total = self.add_tokens(self.log(total), highest)
        mean = self.divide(self.sum(self.multiply(shares, self._statistic(statistics, 1)), -1), total)
        logprobs = self.subtract_tokens(self.sum(self._statistic(statistics, 2), -1), log_total)
        entropy = self.subtract_tokens(log_total, mean)
        if not self.head_shard.entropy_slope:
            entropy = ops.stop_gradient(entropy)
        return self.mask(self.squeeze(logprobs), mask), self.mask(self.squeeze(entropy), mask)

    def _statistic(self, statistics, number):
        stop = (*statistics.shape[:3], number + 1)
        return self.squeeze_column(self.column(statistics, (0, 0, 0, number), stop, (1, 1, 1, 1)))

    def _local(self, hidden, weight, labels, first_row):
        """Statistics of a shard, [rows, length, 1, 3]; a plain reshape of rows split along two axes gathers them."""
        rows = ops.reshape(hidden, (-1, hidden.shape[-1]))
        index = ops.reshape(labels - first_row, (-1, 1))
        if self.tiles is not None:
            statistics = self.tiles(rows, weight, index)
        else:
            logits = ops.stop_gradient(ops.MatMul(transpose_b=True)(rows, weight))
            statistics = self.head_shard(rows, weight, logits, index)
        return ops.reshape(statistics, (*labels.shape, 1, 3))


def _on_each_rank(function, num_parts: int):
    from mindformers.parallel_core.training_graph.device_matrix import layout

    def infer_shape(hidden_shape, weight_shape, labels_shape, starts_shape):
        return [*labels_shape, num_parts, 3]

    def infer_dtype(*dtypes):
        return ms.float32

    morph = ops.operations.Morph(function, infer_shape, infer_dtype)
    return morph.add_prim_attr("self_define_shard", True).shard(
        in_strategy=(layout("dp", "cp", "None"), layout("tp", "None"), layout("dp", "cp"), layout("tp")),
        out_strategy=(layout("dp", "cp", "tp", "None"),),
    )


class PolicyLogProbs(nn.Cell):
    """Log-probabilities of the labels under a model, at a sampling temperature.

    Args:
        model: returns hidden states.
        temperature: of sampling.
        device: `cpu` or `ascend`.
        tile: positions whose logits exist at a time on Ascend; 0 means all.
    """

    def __init__(self, model, temperature: float, device: str, tile: int = 0):
        super().__init__(auto_prefix=False)
        self.model = model
        self.device = device
        if device == "cpu":
            self.token_logprobs = TiledTokenLogProbs(model.head_weight, in_graph=model.dims.tied)
        else:
            self.token_logprobs = GraphTokenLogProbs(model.head_weight, model.splits, tile)
        self.scale = ops.Mul().shard(((*model.splits[:2], 1), ()))
        self.inverse_temperature = 1.0 / temperature

    def leave_entropy(self) -> None:
        """Let entropies have no gradient on Ascend, where it has a price."""
        if isinstance(self.token_logprobs, GraphTokenLogProbs):
            self.token_logprobs.head_shard.entropy_slope = False

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return log-probabilities and entropies, float32 [rows, length] each, 0 where ``mask`` is 0.

        All inputs are [rows, length] as in :class:`mindrlhf.data.packing.PackedRows`; the first has its
        ``model_inputs``.
        """
        # Scaling the hidden states scales the logits, at the width of the model instead of the vocabulary.
        hidden = self.scale(self.model(input_ids, segment_ids), self.inverse_temperature)
        outputs = self.token_logprobs(hidden, labels, mask)
        return outputs[0], outputs[1]
