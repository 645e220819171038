"""REINFORCE: the plain policy gradient.

    -A log pi

Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", eq. 4.
There is no ratio, so from the second update on the same samples it is biased. Nothing is clipped, so nothing is
counted.
"""

from mindspore import nn, ops

RATIO = "none"


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and zeros."""
        return -advantages * logprobs, ops.zeros_like(mask), ops.zeros_like(mask)
