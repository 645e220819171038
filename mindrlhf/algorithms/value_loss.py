"""The loss of a critic: graph code."""

import mindspore as ms
from mindspore import ops

from mindrlhf.algorithms.losses import Loss

# The sums that the loss reports beside its value, in the order of its statistics vector. The second is to be divided
# by the token count.
VALUE_STATISTICS = ("loss", "clipped")

# The token arrays that the loss takes, in order: V_old and R below.
VALUE_INPUTS = ("values", "returns")


class ValueLoss(Loss):
    """Half the squared error of the values, held near the values that the advantages were computed with:

        1 / (2 T) sum_t max((V_t - R_t)^2, (clip(V_t, V_old,t - c, V_old,t + c) - R_t)^2)

    over the response tokens, of which the whole optimiser update has T. The squared error is Schulman et al. 2017
    (arXiv:1707.06347), eq. 9; the clip is that of its implementations: Engstrom et al. 2020 (arXiv:2005.12729), eq. 2,
    and Huang et al. 2024 (arXiv:2403.17031), section 3.

    Args:
        policy: :class:`mindrlhf.algorithms.scores.TokenScores` that scores the text before each token.
        clip_range: c, in units of the reward; 0 leaves the clip out.
    """

    inputs, statistics = VALUE_INPUTS, VALUE_STATISTICS

    def __init__(self, policy, clip_range: float):
        super().__init__(policy)
        self.clip_range = clip_range

    def of(self, outputs, mask, segment_ids, given):
        """See :meth:`mindrlhf.algorithms.losses.Loss.of`."""
        new_values, values, returns = outputs[0], given[0], given[1]
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
        loss = 0.5 * (errors * mask).sum() / given[-1]
        return loss, ops.stack((loss, clipped.sum()))
