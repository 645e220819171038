"""The clip that PPO and its relatives share: graph code."""

import mindspore as ms
from mindspore import ops


def clipped_surrogate(ratio, advantages, lower, upper):
    """Return -min(ratio A, clip(ratio, lower, upper) A) per token, and where the lower and the upper bound bite.

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7. All arrays are float32 [rows, length]; the bounds are constants.
    """
    # A bound bites only where it lowers the objective: that is where the gradient vanishes. Written with masks,
    # since the gradient of a minimum is split where both sides are equal, as they are at ratio 1.
    low = ops.logical_and(ratio < lower, advantages < 0)
    high = ops.logical_and(ratio > upper, advantages > 0)
    clipped = ops.stop_gradient(ops.clip_by_value(ratio, lower, upper))
    losses = -advantages * ops.select(ops.logical_or(low, high), clipped, ratio)
    return losses, ops.cast(low, ms.float32), ops.cast(high, ms.float32)
