"""The vocabulary projection of a graph, tile by tile: logits of some positions and tokens exist at a time, never all.

What :class:`mindrlhf.algorithms.logprobs.GraphTokenLogProbs` computes, for Ascend, whose shard of a whole head is here
too. The backward pass computes every tile again from the log-normaliser. It is written out, since MindSpore's own
differentiation would keep every tile, and one tile waits for the one before, since MindSpore works a graph off level by
level and would otherwise have all of them at once.
"""

import math

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.auto_generate import InplaceScatterAdd

from mindrlhf.algorithms.head import HeadTile

# A row's factor is taken to be at least so much of its label's: what is lost of the others' slopes is far below
# rounding, and the quotient stays finite.
_LEAST_FACTOR = 1e-20


class ChunkedTokenLogProbs(nn.Cell):
    """Log-probabilities and entropies whose logits never exist as a whole.

    Model-parallel ranks share the vocabulary. For each token they exchange the largest logit and three sums, and in the
    backward pass the slopes of both results; hidden states and weights as in the plain form.

    Args:
        weight: output projection [vocabulary, width].
        tile: how much is computed at a time.
        splits: ranks that share the rows, each row, and the vocabulary.
    """

    def __init__(self, weight: ms.Parameter, tile: HeadTile, splits: tuple[int, int, int] = (1, 1, 1)):
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.tile = tile
        self.num_parts = splits[2]
        self.cast = ops.Cast()
        part = weight.shape[0] // self.num_parts
        self.first_rows = ms.Tensor(np.arange(self.num_parts, dtype=np.int32) * part)
        # MindSpore's Morph runs a function on local shards.
        self.on_each_rank = ops.operations.Morph(self._forward, _outputs_shape, outputs_dtype, self._backward)
        self.total = self.largest = None
        tokens = (splits[:2],)
        self.slice = ops.StridedSlice().shard(((*splits[:2], 1),))
        self.squeeze = ops.Squeeze(-1).shard(((*splits[:2], 1),))
        self.mask = ops.Mul().shard(tokens + tokens)
        if max(splits) > 1:
            from mindformers.parallel_core.process_group_config import ModelCommProcessGroups
            from mindformers.parallel_core.training_graph.device_matrix import layout

            self.on_each_rank.add_prim_attr("self_define_shard", True).shard(
                in_strategy=(layout("dp", "cp", "None"), layout("tp", "None"), layout("dp", "cp"), layout("tp")),
                out_strategy=(layout("dp", "cp", "None"),),
            )
            if self.num_parts > 1:
                group = ModelCommProcessGroups.use_parallel_state_groups(required_groups=["tp"]).tp.group
                self.total = ops.AllReduce(ops.ReduceOp.SUM, group)
                self.largest = ops.AllReduce(ops.ReduceOp.MAX, group)

    def construct(self, hidden, labels, mask):
        """Return log-probabilities and entropies, float32 [rows, length] each, 0 where ``mask`` is 0.

        ``hidden`` is [rows, length, width]; ``labels`` int32 and ``mask`` float32 [rows, length].
        """
        weight = self.cast(self.weight, hidden.dtype)
        outputs = self.on_each_rank(hidden, weight, labels, self.first_rows)
        return self.mask(self._output(outputs, 0), mask), self.mask(self._output(outputs, 1), mask)

    def _output(self, outputs, number):
        stop = (*outputs.shape[:2], number + 1)
        return self.squeeze(self.slice(outputs, (0, 0, number), stop, (1, 1, 1)))

    def _forward(self, hidden, weight, labels, first_row):
        """Log-probability, entropy and log-normaliser of each token, float32 [rows, length, 3]."""
        shape, vocab_size = labels.shape, weight.shape[0]
        rows = _as_rows(hidden)
        index = ops.reshape(labels - first_row, (-1, 1))
        largest, sums, chosen, done = (), (), (), ()
        for start, stop in _spans(rows.shape[0], self.tile.positions):
            part, labelled = _cut(rows, start, stop), _cut(index, start, stop)
            found = _tile_statistics(part, weight, labelled, self.tile.vocabulary, done)
            largest, sums, chosen, done = largest + found[:1], sums + found[1:2], chosen + found[2:], found
        largest, sums, chosen = ops.Concat()(largest), ops.Concat()(sums), ops.Concat()(chosen)
        highest = largest if self.largest is None else self.largest(largest)
        sums = _shift(sums, largest, highest)
        inside = ops.cast(ops.logical_and(index >= 0, index < vocab_size), ms.float32)
        parts = ops.concat((sums, (chosen - highest) * inside), -1)
        if self.total is not None:
            parts = self.total(parts)
        total, weighted, chosen = _column(parts, 0), _column(parts, 1), _column(parts, 2)
        log_total = ops.log(total)
        outputs = (chosen - log_total, log_total - weighted / total, highest + log_total)
        return ops.reshape(ops.concat(outputs, -1), (*shape, 3))

    def _backward(self, hidden, weight, labels, first_row, outputs, slopes):
        """Gradients of the inputs.

        With z the logits and p their softmax: d log p(label) / dz = onehot(label) - p, and
        d entropy / dz = -p (log p + entropy).
        """
        rows = _as_rows(hidden)
        index = ops.reshape(labels - first_row, (-1, 1))
        outputs, slopes = _as_rows(outputs), _as_rows(slopes)
        # What several ranks hold has, on each, a part of its gradient in MindSpore's graphs.
        if self.total is not None:
            slopes = self.total(slopes)
        tiles = _spans(weight.shape[0], self.tile.vocabulary)
        grad_rows, grad_weight, done = (), (), ()
        for start, stop in _spans(rows.shape[0], self.tile.positions):
            tokens = (_cut(outputs, start, stop), _cut(slopes, start, stop), _cut(index, start, stop))
            grad_tile, grad_tiles, part = 0.0, (), _cut(rows, start, stop)
            for number, (first, last) in enumerate(tiles):
                table = ops.depend(_cut(weight, first, last), done)
                grad_logits = _logit_gradients(part, table, tokens, first)
                grad_tile = grad_tile + ops.cast(ops.MatMul()(grad_logits, table), ms.float32)
                added = ops.cast(ops.MatMul(transpose_a=True)(grad_logits, part), ms.float32)
                if start > 0:
                    added = grad_weight[number] + added
                done = (grad_tile, added)
                if stop == rows.shape[0]:
                    added = ops.cast(added, weight.dtype)
                grad_tiles = grad_tiles + (added,)
            grad_rows, grad_weight = grad_rows + (ops.cast(grad_tile, hidden.dtype),), grad_tiles
        grad_hidden = ops.Reshape()(ops.Concat()(grad_rows), hidden.shape)
        return grad_hidden, ops.Concat()(grad_weight), ops.ZerosLike()(labels), ops.ZerosLike()(first_row)


class HeadShard(nn.Cell):
    """Log-sum, mean and chosen logit of each row, with a gradient written out.

    Of logits z and their softmax p: log sum exp(z), sum p z, and the label's z, or 0 where it is another rank's. With
    logits in bfloat16, the passes over one beside the products move 6 (cast) + 2 (where the largest is) + 8 (softmax)
    + 8 (p z) bytes, and 4 (softmax) in the backward pass: factors of whole rows are applied to the rows of the
    products, which are as wide as the model only. A gradient of the mean takes 44 bytes more.

    Args:
        in_place: the label's slope is added in place, by an operator that only Ascend has.

    Attributes:
        entropy_slope: the mean has a gradient.
    """

    entropy_slope = True

    def __init__(self, in_place: bool):
        super().__init__(auto_prefix=False)
        self.add_in_place = InplaceScatterAdd() if in_place else None
        self.softmax = ops.Softmax()
        self.largest, self.block_product = ops.ArgMaxWithValue(-1, True), ops.BatchMatMul(transpose_b=True)

    def construct(self, rows, weight, logits, index):
        """Return the three, float32 [n, 3].

        ``rows`` are [n, width], ``weight`` [v, width], ``index`` int32 [n, 1] is the label's row of the weight;
        ``logits``, the product [n, v], are given without a gradient, to be there for the backward pass.
        """
        where, largest = self.largest(logits)
        wide = ops.cast(logits, ms.float32)
        p = self.softmax(wide)
        log_sum = ops.cast(largest, ms.float32) - ops.log(ops.gather_elements(p, 1, where))
        inside, index = _own(index, weight.shape[0])
        chosen = ops.cast(ops.gather_elements(logits, 1, index), ms.float32) * inside
        return ops.concat((log_sum, self._dot(p, wide), chosen), -1)

    def bprop(self, rows, weight, logits, index, statistics, slope):
        """d log_sum / dz = p, d mean / dz = p (1 + z - mean), d chosen / dz = 1 at the label."""
        inside, own = _own(index, weight.shape[0])
        from_sum, from_mean, from_label = slope[:, 0:1], slope[:, 1:2], slope[:, 2:3] * inside
        if self.entropy_slope:
            wide, rest = ops.cast(logits, ms.float32), from_sum + from_mean * (1.0 - statistics[:, 1:2])
            grad_logits = ops.cast(self.softmax(wide) * (wide * from_mean + rest), logits.dtype)
            factor = ops.OnesLike()(from_sum)
        else:
            least = -_LEAST_FACTOR * from_label
            factor = ops.select(ops.abs(from_sum) > ops.abs(least), from_sum, least)
            grad_logits = self.softmax(logits)
        quotient = from_label / ops.select(ops.equal(factor, 0.0), ops.OnesLike()(factor), factor)
        grad_logits = self._added(grad_logits, own, ops.cast(quotient, logits.dtype))
        grad_rows = ops.cast(ops.MatMul()(grad_logits, weight), ms.float32) * factor
        scaled = ops.cast(ops.cast(rows, ms.float32) * factor, rows.dtype)
        grad_weight = ops.MatMul(transpose_a=True)(grad_logits, scaled)
        return ops.cast(grad_rows, rows.dtype), grad_weight, ops.ZerosLike()(logits), ops.ZerosLike()(index)

    def _added(self, grad_logits, index, values):
        if self.add_in_place is None:
            return ops.tensor_scatter_elements(grad_logits, index, values, 1, "add")
        return self.add_in_place(grad_logits, 1, ops.cast(index, ms.int64), values)

    def _dot(self, left, right):
        """Sums of products of rows [n, 1]: the diagonals of products of 16 rows with 16, which read each once."""
        count, width = left.shape
        size = _block(count)
        shape = (count // size, size, width)
        products = self.block_product(ops.reshape(left, shape), ops.reshape(right, shape))
        products = products * ms.Tensor(np.eye(size, dtype=np.float32))
        return ops.reshape(ops.ReduceSum()(products, -1), (count, 1))


def _tile_statistics(rows, weight, index, num_columns, done):
    """Largest logit [n, 1]; sums of exp(z - largest) and of that times (z - largest) [n, 2]; the labels' logits [n, 1].

    Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithm 3, over the tokens of one rank.
    """
    largest, sums, chosen = None, None, None
    for first, last in _spans(weight.shape[0], num_columns):
        logits = _logits(rows, ops.depend(_cut(weight, first, last), done))
        picked = _pick(logits, index - first)
        highest = ops.ReduceMax(keep_dims=True)(logits, -1)
        logits = logits - highest
        powers = ops.exp(logits)
        add_up = ops.ReduceSum(keep_dims=True)
        found = ops.concat((add_up(powers, -1), add_up(powers * logits, -1)), -1)
        if largest is None:
            largest, sums, chosen = highest, found, picked
        else:
            both = ops.maximum(largest, highest)
            sums = _shift(sums, largest, both) + _shift(found, highest, both)
            largest, chosen = both, chosen + picked
        done = (largest, sums, chosen)
    return largest, sums, chosen


def _logit_gradients(rows, table, tokens, first_id):
    """Gradients [n, vocabulary] of a tile of logits, in the compute dtype.

    With z the logits and p their softmax: d log p(label) / dz = onehot(label) - p, d entropy / dz = -p (log p +
    entropy).
    """
    outputs, slopes, index = tokens
    grad_logprobs, grad_entropy = _column(slopes, 0), _column(slopes, 1)
    logprobs = _logits(rows, table) - _column(outputs, 2)
    # Or the labels' places in all tiles would be made first: as much as one whole of the logits.
    index = ops.depend(index, logprobs)
    factor = -grad_logprobs - grad_entropy * (logprobs + _column(outputs, 1))
    ids = ops.reshape(ops.range(first_id, first_id + table.shape[0], 1), (1, -1))
    is_label = ops.cast(ops.equal(index, ops.cast(ids, index.dtype)), ms.float32)
    return ops.cast(ops.exp(logprobs) * factor + is_label * grad_logprobs, rows.dtype)


def _shift(sums, old, new):
    """Sums [n, 2] of exp(z - old) and exp(z - old) (z - old), with ``new`` in the place of ``old``, [n, 1] both."""
    moved = old - new
    total = _column(sums, 0)
    return ops.concat((total, _column(sums, 1) + total * moved), -1) * ops.exp(moved)


def _logits(rows, table):
    return ops.cast(ops.MatMul(transpose_b=True)(rows, table), ms.float32)


def _pick(logits, index):
    """Logits [n, 1] of the labels that are among the tile's tokens, else 0."""
    inside = ops.logical_and(index >= 0, index < logits.shape[-1])
    chosen = ops.gather_elements(logits, 1, ops.select(inside, index, ops.ZerosLike()(index)))
    return chosen * ops.cast(inside, ms.float32)


def _as_rows(values):
    return ops.reshape(values, (-1, values.shape[-1]))


@ops.constexpr
def _spans(size, step):
    step = step or size
    return tuple((start, min(start + step, size)) for start in range(0, size, step))


def _cut(values, start, stop):
    width = values.shape[1]
    return ops.StridedSlice()(values, (start, 0), (stop, width), (1, 1))


def _column(values, number):
    return ops.StridedSlice()(values, (0, number), (values.shape[0], number + 1), (1, 1))


def _outputs_shape(hidden_shape, weight_shape, labels_shape, first_row_shape):
    return [*labels_shape, 3]


def outputs_dtype(hidden_dtype, *others):
    return ms.float32


@ops.constexpr
def _block(count):
    return math.gcd(count, 16)


def _own(index, size):
    """Return 1 where a label is this rank's, else 0, and its row, 0 where it is not."""
    inside = ops.logical_and(index >= 0, index < size)
    return ops.cast(inside, ms.float32), ops.select(inside, index, ops.ZerosLike()(index))
