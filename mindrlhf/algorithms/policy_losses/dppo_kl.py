"""DPPO, binary KL: a token's gradient goes by the divergence of the policies, not by the ratio.

    -M rho A,  M = 0 where A > 0, pi > pi_old and D > clip_high, or A < 0, pi < pi_old and D > clip_low, else 1
    D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

with rho = pi / pi_old of the token: Qi et al. 2026 (arXiv:2602.04879). D is KL(pi_old || pi) when all tokens but the
sampled one are merged into one (eq. 14), never above the whole one. The paper's pi_old is the generator's own, which is
`correction.bypass`.
"""

import mindspore as ms
from mindspore import nn, ops

RATIO = "token"
KEYS = ("clip_low", "clip_high")

# 1 - p of a float32 probability is 0 or a multiple of 6e-8: below this it is rounding.
LEAST_REST = 1e-7


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 0.05, clip_high: float = 0.05):
        super().__init__(auto_prefix=False)
        self.clip_low, self.clip_high = clip_low, clip_high

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        old = ops.stop_gradient(ops.exp(logprobs - log_ratio))
        rest, old_rest = self._rest(ops.stop_gradient(ops.exp(logprobs))), self._rest(old)
        divergence = (old_rest * (ops.log(old_rest) - ops.log(rest)) - old * ops.stop_gradient(log_ratio)) * mask
        fell = ops.logical_and(log_ratio < 0, advantages < 0)
        rose = ops.logical_and(log_ratio > 0, advantages > 0)
        low = ops.cast(ops.logical_and(fell, divergence > self.clip_low), ms.float32)
        high = ops.cast(ops.logical_and(rose, divergence > self.clip_high), ms.float32)
        return -(1.0 - low - high) * ops.exp(log_ratio) * advantages, low, high

    def _rest(self, probabilities):
        return ops.clip_by_value(1.0 - probabilities, LEAST_REST, 1.0)
