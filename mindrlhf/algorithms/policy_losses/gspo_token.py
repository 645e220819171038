"""GSPO-token: the value of GSPO's ratio, with the gradient of each token of its own.

    s_t = sg(s) pi / sg(pi),  -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

with s of :mod:`mindrlhf.algorithms.policy_losses.gspo` and sg to stop gradients: Zheng et al. 2025 (arXiv:2507.18071),
eq. 13 and 14. Equal to GSPO when the advantages are constant within a response; here they need not be.
"""

from mindspore import nn, ops

from mindrlhf.algorithms.clipping import clipped_surrogate
from mindrlhf.algorithms.sequences import sequence_means

RATIO = "sequence"
KEYS = ("clip_low", "clip_high")


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 3e-4, clip_high: float = 4e-4):
        super().__init__(auto_prefix=False)
        self.lower, self.upper = 1.0 - clip_low, 1.0 + clip_high

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        mean = ops.stop_gradient(sequence_means(log_ratio, mask, segment_ids))
        ratio = ops.exp(mean) * ops.exp(logprobs - ops.stop_gradient(logprobs))
        return clipped_surrogate(ratio, advantages, self.lower, self.upper)
