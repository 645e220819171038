"""PPO's clip, with a bound on how much a bad token can weigh.

    A >= 0: -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
    A < 0:  -max(min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), dual_clip A)

with rho = pi / pi_old of the token: Ye et al. 2020 (arXiv:1912.09729), "dual-clip PPO", there with dual_clip 3.
Tokens beyond dual_clip are counted with the upper bound.
"""

import mindspore as ms
from mindspore import nn, ops

from mindrlhf.algorithms.clipping import clipped_surrogate

RATIO = "token"
KEYS = ("clip_low", "clip_high")
OPTIONS = {"dual_clip": (3.0, 1.0, None, "bound of the ratio of tokens with a negative advantage")}


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0):
        super().__init__(auto_prefix=False)
        self.lower, self.upper = 1.0 - clip_low, 1.0 + clip_high
        self.dual_clip = dual_clip

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        ratio = ops.exp(log_ratio)
        losses, low, high = clipped_surrogate(ratio, advantages, self.lower, self.upper)
        beyond = ops.logical_and(ratio > self.dual_clip, advantages < 0)
        losses = ops.select(beyond, -advantages * self.dual_clip, losses)
        return losses, low, high + ops.cast(beyond, ms.float32)
