"""The loss of a critic: graph code."""

import mindspore as ms
from mindspore import nn, ops

# The sums that the loss reports beside its value, in the order of its statistics vector. The second is to be divided
# by the token count.
VALUE_STATISTICS = ("loss", "clipped")

# The token arrays that the loss takes after the four of every cell, in order.
VALUE_INPUTS = ("values", "returns")


class ValueLoss(nn.Cell):
    """Half the squared error of the values, held near the values that the advantages were computed with:

        1 / (2 T) sum_t max((V_t - R_t)^2, (clip(V_t, V_old,t - c, V_old,t + c) - R_t)^2)

    over the response tokens, of which the whole optimiser update has T. The squared error is Schulman et al. 2017
    (arXiv:1707.06347), eq. 9; the clip is that of its implementations: Engstrom et al. 2020 (arXiv:2005.12729), eq. 2,
    and Huang et al. 2024 (arXiv:2403.17031), section 3.

    Args:
        policy: :class:`mindrlhf.algorithms.scores.TokenScores` that scores the text before each token; its name is
            what :class:`mindrlhf.training.worker.learner.Learner` expects.
        clip_range: c, in units of the reward; 0 leaves the clip out.
    """

    def __init__(self, policy, clip_range: float):
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.clip_range = clip_range

    def construct(self, input_ids, segment_ids, labels, mask, values, returns, num_tokens):
        """Return the loss, its statistics [2] (see ``VALUE_STATISTICS``) and the new values.

        Args:
            input_ids, segment_ids, labels, mask: [rows, length], as every cell takes them.
            values: V_old, float32 [rows, length], unread where ``mask`` is 0.
            returns: R, float32 [rows, length], the targets.
            num_tokens: T, float32 scalar.
        """
        new_values, _ = self.policy(input_ids, segment_ids, labels, mask)
        errors = ops.square(new_values - returns)
        clipped = ops.zeros_like(mask)
        if self.clip_range > 0:
            # Written with a mask, since the gradient of a maximum is split where both sides are equal, as they are
            # wherever the clip does not bite. Where it does, the bound has no gradient.
            moves = new_values - values
            bounded = values + ops.clip_by_value(moves, -self.clip_range, self.clip_range)
            bounded_errors = ops.stop_gradient(ops.square(bounded - returns))
            is_clipped = ops.logical_and(ops.abs(moves) > self.clip_range, bounded_errors > errors)
            errors = ops.select(is_clipped, bounded_errors, errors)
            clipped = ops.cast(is_clipped, ms.float32) * mask
        loss = 0.5 * (errors * mask).sum() / num_tokens
        statistics = ops.stop_gradient(ops.stack((loss, clipped.sum())))
        return loss, statistics, ops.stop_gradient(new_values)
