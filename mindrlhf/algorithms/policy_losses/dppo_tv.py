"""DPPO, binary total variation: a token's gradient goes by how far its probability moved, not by the ratio.

    -M rho A,  M = 0 where A > 0 and pi - pi_old > clip_high, or A < 0 and pi_old - pi > clip_low, else 1

with rho = pi / pi_old of the token: Qi et al. 2026 (arXiv:2602.04879). |pi - pi_old| is the total variation between the
two policies when all tokens but the sampled one are merged into one (eq. 13), never above the whole one.
The paper's pi_old is the generator's own, which is `correction.bypass`.
"""

import mindspore as ms
from mindspore import nn, ops

RATIO = "token"
KEYS = ("clip_low", "clip_high")


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 0.15, clip_high: float = 0.15):
        super().__init__(auto_prefix=False)
        self.clip_low, self.clip_high = clip_low, clip_high

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        moved = ops.stop_gradient(ops.exp(logprobs) - ops.exp(logprobs - log_ratio)) * mask
        low = ops.cast(ops.logical_and(moved < -self.clip_low, advantages < 0), ms.float32)
        high = ops.cast(ops.logical_and(moved > self.clip_high, advantages > 0), ms.float32)
        return -(1.0 - low - high) * ops.exp(log_ratio) * advantages, low, high
