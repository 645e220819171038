"""Losses of rows that are split over the ranks, for semi-auto-parallel graphs."""

from mindformers.parallel_core.training_graph.device_matrix import layout
from mindspore import lazy_inline, nn, ops
from mindspore.ops.operations import Morph

from mindrlhf.algorithms.losses import MOST_INPUTS, Loss


class ShardedLoss(nn.Cell):
    """A loss of rows that are split over data- and context-parallel ranks.

    Losses are sums over tokens divided by a global count, so each rank applies the plain loss to its tokens (inside a
    Morph, where tensors are local), and the results are added.

    Its output is the vector of statistics, of which the first is the loss; the gradient of their sum is that of the
    loss. A second one, without a gradient, is what the model says of the rows, [1, rows, length].

    Args:
        loss: the plain one, over the model that is trained, its operators sharded.
        shares: ranks that share the rows, and each row.
        returns_outputs: has the second output.

    Attributes:
        num_statistics: length of the output.
    """

    def __init__(self, loss: Loss, shares: tuple[int, int], returns_outputs: bool):
        super().__init__(auto_prefix=False)
        self.loss = loss
        self.policy = loss.policy
        self.shares = shares
        self.returns_outputs = returns_outputs
        self.num_statistics = len(loss.statistics)
        self.num_unread = MOST_INPUTS - len(loss.inputs)
        self.num_inputs = len(loss.inputs)
        per_token = layout("dp", "cp")
        self.on_each_rank = Morph(self._local, self._infer_shape, self._infer_dtype)
        self.on_each_rank.add_prim_attr("self_define_shard", True).shard(
            in_strategy=(*((per_token,) * (4 + MOST_INPUTS)), layout("dp", "None")),
            out_strategy=(layout("dp", "cp", "None"),),
        )
        self.sum = ops.ReduceSum().shard(((*shares, 1),))
        # Gathers what the ranks that share a row say of it.
        self.whole_rows = ops.ExpandDims().shard(((shares[0], 1),))

    def construct(self, input_ids, segment_ids, labels, mask, *given):
        """Return the statistics of arrays [rows, length] as the plain loss takes them, and outputs.

        The last of ``given`` are its scalars, float32 [rows, 2]: kl_coefficient and num_tokens, the same on every row,
        so that they can be cut into micro-batches.
        """
        outputs, entropy = self.policy(input_ids, segment_ids, labels, mask)
        unread = (mask,) * self.num_unread
        shares = self.on_each_rank(outputs, entropy, mask, segment_ids, *given[:-1], *unread, given[-1])
        statistics = self.sum(shares, (0, 1))
        if not self.returns_outputs:
            return statistics
        return statistics, ops.stop_gradient(self.whole_rows(outputs, 0))

    def _local(self, outputs, entropy, mask, segment_ids, first, second, third, fourth, fifth, sixth, scalars):
        """Apply the plain loss to one rank's tokens."""
        given = (first, second, third, fourth, fifth, sixth)[: self.num_inputs] + (scalars[0, 0], scalars[0, 1])
        loss, statistics = self.loss.of((outputs, entropy), mask, segment_ids, given)
        vector = ops.concat((ops.reshape(loss, (1,)), ops.stop_gradient(statistics)[1:]))
        return ops.reshape(vector, (1, 1, self.num_statistics))

    def _infer_shape(self, *shapes):
        return [*self.shares, self.num_statistics]

    def _infer_dtype(self, *dtypes):
        return dtypes[0]


class RepeatedLoss(ShardedLoss):
    """One that a graph calls for several micro-batches: compiled once, which also tells a pipeline them apart.

    Where there is one call, this would hide the casts of weights from the pass that moves them before the gathers.
    """

    @lazy_inline
    def __init__(self, loss: Loss, shares: tuple[int, int], returns_outputs: bool):
        super().__init__(loss, shares, returns_outputs)
