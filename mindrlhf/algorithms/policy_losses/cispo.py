"""CISPO: the clip on the weight of a token's gradient, which therefore never vanishes.

    -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi,  rho = pi / pi_old of the token

with sg to stop gradients: MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5. The paper bounds the ratio above only, which is
clip_low 1; the bound of 5 that is common is clip_high 4. Tokens whose weight a bound changes are counted.
"""

import mindspore as ms
from mindspore import nn, ops

RATIO = "token"
KEYS = ("clip_low", "clip_high")


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 1.0, clip_high: float = 4.0):
        super().__init__(auto_prefix=False)
        self.lower, self.upper = 1.0 - clip_low, 1.0 + clip_high

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        ratio = ops.stop_gradient(ops.exp(log_ratio))
        losses = -ops.clip_by_value(ratio, self.lower, self.upper) * advantages * logprobs
        return losses, ops.cast(ratio < self.lower, ms.float32), ops.cast(ratio > self.upper, ms.float32)
