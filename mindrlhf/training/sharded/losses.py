"""Losses of rows that are split over the ranks, for semi-auto-parallel graphs."""

from collections.abc import Callable

from mindformers.parallel_core.training_graph.device_matrix import layout
from mindspore import lazy_inline, nn, ops
from mindspore.ops.operations import Morph

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import (
    COEFFICIENT_INPUTS,
    POLICY_INPUTS,
    POLICY_STATISTICS,
    TOKEN_STATISTICS,
    CoefficientLoss,
    SupervisedLoss,
)
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.algorithms.value_loss import VALUE_INPUTS, VALUE_STATISTICS, ValueLoss


class GivenOutputs(nn.Cell):
    """A model whose outputs are there already: the first comes in place of tokens, the second of labels."""

    def construct(self, first, segment_ids, second, mask):
        """Return ``first`` and ``second`` as they are."""
        return first, second


class ShardedLoss(nn.Cell):
    """A loss of rows that are split over data- and context-parallel ranks.

    Losses are sums over tokens divided by a global count, so each rank applies the plain loss cell to its tokens
    (inside a Morph, where tensors are local), and the results are added.

    Its output is the vector of statistics, of which the first is the loss; the gradient of their sum is that of the
    loss.

    Args:
        policy: the model that is trained, its operators sharded.
        local_loss: the plain loss cell, over :class:`GivenOutputs`.
        shares: ranks that share the rows, and each row.

    Attributes:
        token_inputs: names of the token arrays that it takes after the four of every cell, in order; the last input is
            ``scalars``, float32 [rows, 2]: kl_coefficient and num_tokens, the same on every row, so that it can be cut
            into micro-batches.
        num_statistics: length of the output.
    """

    token_inputs: tuple[str, ...]
    num_statistics: int

    def __init__(self, policy: nn.Cell, local_loss: nn.Cell, shares: tuple[int, int]):
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.local_loss = local_loss
        self.shares = shares
        per_token = layout("dp", "cp")
        self.on_each_rank = Morph(self._local, self._infer_shape, self._infer_dtype)
        self.on_each_rank.add_prim_attr("self_define_shard", True).shard(
            in_strategy=(*((per_token,) * (4 + len(self.token_inputs))), layout("dp", "None")),
            out_strategy=(layout("dp", "cp", "None"),),
        )
        self.sum = ops.ReduceSum().shard(((*shares, 1),))

    def _local(self, *inputs):
        """Apply the plain loss to one rank's tokens; a Morph takes no *args, so each loss spells its own out."""
        raise NotImplementedError

    def _as_share(self, loss, statistics):
        vector = ops.concat((ops.reshape(loss, (1,)), ops.stop_gradient(statistics)[1:]))
        return ops.reshape(vector, (1, 1, self.num_statistics))

    def _infer_shape(self, *shapes):
        return [*self.shares, self.num_statistics]

    def _infer_dtype(self, *dtypes):
        return dtypes[0]


class ShardedPolicyLoss(ShardedLoss):
    """The loss of a policy.

    Args:
        policy: log-probabilities, its operators sharded.
        make_loss: builds a :class:`mindrlhf.algorithms.losses.PolicyLoss` over a policy.
        shares: of :class:`ShardedLoss`.
    """

    token_inputs = POLICY_INPUTS
    num_statistics = len(POLICY_STATISTICS)

    @lazy_inline
    def __init__(self, policy: PolicyLogProbs, make_loss: Callable[[nn.Cell], nn.Cell], shares: tuple[int, int]):
        super().__init__(policy, make_loss(GivenOutputs()), shares)

    def _local(self, logprobs, segment_ids, entropy, mask, advantages, weights, old, reference, rollout, scalars):
        loss, statistics, _ = self.local_loss(
            logprobs,
            segment_ids,
            entropy,
            mask,
            advantages,
            weights,
            old,
            reference,
            rollout,
            scalars[0, 0],
            scalars[0, 1],
        )
        return self._as_share(loss, statistics)

    def construct(
        self,
        input_ids,
        segment_ids,
        labels,
        mask,
        advantages,
        weights,
        old_logprobs,
        reference_logprobs,
        rollout_logprobs,
        scalars,
    ):
        """Return the statistics [7] of arrays [rows, length] as in :class:`mindrlhf.algorithms.losses.PolicyLoss`."""
        logprobs, entropy = self.policy(input_ids, segment_ids, labels, mask)
        shares = self.on_each_rank(
            logprobs,
            segment_ids,
            entropy,
            mask,
            advantages,
            weights,
            old_logprobs,
            reference_logprobs,
            rollout_logprobs,
            scalars,
        )
        return self.sum(shares, (0, 1))


class ShardedValueLoss(ShardedLoss):
    """The loss of a critic.

    Args:
        critic: values, its operators sharded.
        clip_range: of :class:`mindrlhf.algorithms.value_loss.ValueLoss`.
        shares: of :class:`ShardedLoss`.
    """

    token_inputs = VALUE_INPUTS
    num_statistics = len(VALUE_STATISTICS)

    @lazy_inline
    def __init__(self, critic: TokenScores, clip_range: float, shares: tuple[int, int]):
        super().__init__(critic, ValueLoss(GivenOutputs(), clip_range), shares)

    def _local(self, new_values, segment_ids, unread, mask, values, returns, scalars):
        loss, statistics, _ = self.local_loss(new_values, segment_ids, unread, mask, values, returns, scalars[0, 1])
        return self._as_share(loss, statistics)

    def construct(self, input_ids, segment_ids, labels, mask, values, returns, scalars):
        """Return the statistics [2] of arrays [rows, length], as in the plain loss."""
        new_values, unread = self.policy(input_ids, segment_ids, labels, mask)
        shares = self.on_each_rank(new_values, segment_ids, unread, mask, values, returns, scalars)
        return self.sum(shares, (0, 1))


class ShardedSupervisedLoss(ShardedLoss):
    """The loss of supervised fine-tuning.

    Args:
        policy: log-probabilities, its operators sharded.
        shares: of :class:`ShardedLoss`.
    """

    token_inputs = ()
    num_statistics = len(TOKEN_STATISTICS)

    @lazy_inline
    def __init__(self, policy: PolicyLogProbs, shares: tuple[int, int]):
        super().__init__(policy, SupervisedLoss(GivenOutputs()), shares)

    def _local(self, logprobs, segment_ids, entropy, mask, scalars):
        loss, statistics, _ = self.local_loss(logprobs, segment_ids, entropy, mask, scalars[0, 1])
        return self._as_share(loss, statistics)

    def construct(self, input_ids, segment_ids, labels, mask, scalars):
        """Return the statistics [2] of arrays [rows, length], as in the plain loss."""
        logprobs, entropy = self.policy(input_ids, segment_ids, labels, mask)
        return self.sum(self.on_each_rank(logprobs, segment_ids, entropy, mask, scalars), (0, 1))


class ShardedCoefficientLoss(ShardedLoss):
    """The loss whose derivatives the host has computed, of log-probabilities or of scores.

    Args:
        policy: log-probabilities or scores, its operators sharded.
        shares: of :class:`ShardedLoss`.
    """

    token_inputs = COEFFICIENT_INPUTS
    num_statistics = len(TOKEN_STATISTICS)

    @lazy_inline
    def __init__(self, policy: PolicyLogProbs | TokenScores, shares: tuple[int, int]):
        super().__init__(policy, CoefficientLoss(GivenOutputs()), shares)

    def _local(self, outputs, segment_ids, entropy, mask, coefficients, scalars):
        loss, statistics, _ = self.local_loss(outputs, segment_ids, entropy, mask, coefficients, scalars[0, 1])
        return self._as_share(loss, statistics)

    def construct(self, input_ids, segment_ids, labels, mask, coefficients, scalars):
        """Return the statistics [2] of arrays [rows, length], as in the plain loss."""
        outputs, entropy = self.policy(input_ids, segment_ids, labels, mask)
        return self.sum(self.on_each_rank(outputs, segment_ids, entropy, mask, coefficients, scalars), (0, 1))
