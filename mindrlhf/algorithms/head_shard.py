"""One rank's part of the vocabulary projection: what a row's logits come to, with a gradient written out."""

import math

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.auto_generate import InplaceScatterAdd

# A row's factor is taken to be at least so much of its label's: what is lost of the others' slopes is far below
# rounding, and the quotient stays finite.
_LEAST_FACTOR = 1e-20


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


class TiledHeadShard(nn.Cell):
    """A :class:`HeadShard` whose logits exist for some rows at a time, and are computed again in the backward pass.

    MindSpore's own differentiation would keep the logits of every tile, and a gradient of the weight for each. One tile
    waits for the one before: MindSpore works a graph off level by level and would have all of them at once.
    """

    def __init__(self, head_shard: HeadShard, num_rows: int):
        super().__init__(auto_prefix=False)
        self.head_shard = head_shard
        self.num_rows = num_rows
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, rows, weight, index):
        """Return the statistics of :meth:`HeadShard.construct`, float32 [n, 3]."""
        statistics, done = (), ()
        for start, stop in _spans(rows.shape[0], self.num_rows):
            part, weight = _cut(rows, start, stop), ops.depend(weight, done)
            done = self.head_shard(part, weight, self.product(part, weight), _cut(index, start, stop))
            statistics += (done,)
        return ops.Concat()(statistics)

    def bprop(self, rows, weight, index, statistics, slope):
        """Add the weight's gradient up in float32."""
        grad_rows, grad_weight, done = (), 0.0, ()
        for start, stop in _spans(rows.shape[0], self.num_rows):
            part, table = _cut(rows, start, stop), ops.depend(weight, done)
            others = [_cut(values, start, stop) for values in (index, statistics, slope)]
            gradients = self.head_shard.bprop(part, table, self.product(part, table), *others)
            grad_weight = grad_weight + ops.cast(gradients[1], ms.float32)
            grad_rows += (gradients[0],)
            done = (gradients[0], grad_weight)
        return ops.Concat()(grad_rows), ops.cast(grad_weight, weight.dtype), ops.ZerosLike()(index)


@ops.constexpr
def _spans(size, step):
    return tuple((start, min(start + step, size)) for start in range(0, size, step))


def _cut(values, start, stop):
    return ops.StridedSlice()(values, (start, 0), (stop, values.shape[1]), (1, 1))


@ops.constexpr
def _block(count):
    return math.gcd(count, 16)


def _own(index, size):
    """Return 1 where a label is this rank's, else 0, and its row, 0 where it is not."""
    inside = ops.logical_and(index >= 0, index < size)
    return ops.cast(inside, ms.float32), ops.select(inside, index, ops.ZerosLike()(index))
