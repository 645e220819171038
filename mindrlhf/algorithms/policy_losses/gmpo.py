"""GMPO: the geometric mean of the tokens' ratios, each clipped before.

    -(prod_t c_t)^(1 / n) A,  c_t = min(rho_t, exp(clip_high)) where A > 0, max(rho_t, exp(-clip_low)) where A < 0

with rho_t = pi / pi_old of the token: Zhao et al. 2025 (arXiv:2507.20673), with bounds of e^-0.4 and e^0.4, section 4,
so that the clips are of the logarithm. Each token of a response carries the response's loss, so that `sequence_mean` is
the paper's mean over responses. The advantages must be constant within a response.
"""

import mindspore as ms
from mindspore import nn, ops

from mindrlhf.algorithms.sequences import sequence_means

RATIO = "sequence"
KEYS = ("clip_low", "clip_high")
CONSTANT_ADVANTAGE = True


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 0.4, clip_high: float = 0.4):
        super().__init__(auto_prefix=False)
        self.lower, self.upper = -clip_low, clip_high

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        low = ops.logical_and(log_ratio < self.lower, advantages < 0)
        high = ops.logical_and(log_ratio > self.upper, advantages > 0)
        bounded = ops.stop_gradient(ops.clip_by_value(log_ratio, self.lower, self.upper))
        kept = ops.select(ops.logical_or(low, high), bounded, log_ratio)
        losses = -ops.exp(sequence_means(kept, mask, segment_ids)) * advantages
        return losses, ops.cast(low, ms.float32), ops.cast(high, ms.float32)
