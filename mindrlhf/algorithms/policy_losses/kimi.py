"""Kimi's mirror descent: the policy gradient, held near the old policy by a square.

    -A log pi(y) + mirror_tau / 2 (log pi(y) / pi_old(y))^2  for each response y

Kimi k1.5 (arXiv:2501.12599), section 2.3.2, where it is the gradient that is given, with A the reward minus the group's
mean, so :mod:`mindrlhf.algorithms.advantages.dr_grpo`. Every token carries an equal part of the response's square, so
that summed over the tokens (`sequence_sum`) it is whole. Nothing is clipped, so nothing is counted.
"""

from mindspore import nn, ops

from mindrlhf.algorithms.sequences import sequence_sums

RATIO = "sequence"
OPTIONS = {"mirror_tau": (0.1, 0.0, None, "weight of the square that holds a response back")}
NEEDS_ADVANTAGE = False


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, mirror_tau: float = 0.1):
        super().__init__(auto_prefix=False)
        self.mirror_tau = mirror_tau

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and zeros."""
        counts = sequence_sums(mask, segment_ids)
        total = sequence_sums(log_ratio, segment_ids)
        square = 0.5 * self.mirror_tau * total * total / ops.maximum(counts, ops.ones_like(counts))
        return -advantages * logprobs + square, ops.zeros_like(mask), ops.zeros_like(mask)
