"""GSPO: the clip on the ratio of whole responses, normalised by length.

    s = exp(1 / n sum_t log(pi / pi_old)),  -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

Zheng et al. 2025 (arXiv:2507.18071), eq. 5 and 7, with clips of 3e-4 and 4e-4 (section 5.1). Each token of a response
carries the response's loss, so that the aggregation `sequence_mean` is the paper's mean over responses. The advantages
must be constant within a response; :mod:`mindrlhf.algorithms.policy_losses.gspo_token` takes others.
"""

from mindspore import nn, ops

from mindrlhf.algorithms.clipping import clipped_surrogate
from mindrlhf.algorithms.sequences import sequence_means

RATIO = "sequence"
KEYS = ("clip_low", "clip_high")
CONSTANT_ADVANTAGE = True


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 3e-4, clip_high: float = 4e-4):
        super().__init__(auto_prefix=False)
        self.lower, self.upper = 1.0 - clip_low, 1.0 + clip_high

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        ratio = ops.exp(sequence_means(log_ratio, mask, segment_ids))
        return clipped_surrogate(ratio, advantages, self.lower, self.upper)
