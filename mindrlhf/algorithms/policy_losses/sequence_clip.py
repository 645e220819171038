"""The clip on the ratio of whole responses: a response is one action.

    rho = prod_t pi / pi_old,  -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with the action of RLOO, Ahmadian et al. 2024 (arXiv:2402.14740); at
ratio 1 its gradient is theirs, A times that of log pi(response). Each token carries the response's loss, so that the
aggregation `sequence_mean` is the mean over responses. The advantages must be constant within a response.
"""

from mindspore import nn, ops

from mindrlhf.algorithms.clipping import clipped_surrogate
from mindrlhf.algorithms.sequences import sequence_sums

RATIO = "sequence"
KEYS = ("clip_low", "clip_high")
CONSTANT_ADVANTAGE = True

MAX_LOG_RATIO = 20.0


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.2):
        super().__init__(auto_prefix=False)
        self.lower, self.upper = 1.0 - clip_low, 1.0 + clip_high

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        log_ratio = ops.clip_by_value(sequence_sums(log_ratio, segment_ids), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return clipped_surrogate(ops.exp(log_ratio), advantages, self.lower, self.upper)
