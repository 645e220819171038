"""PPO's clip, with a bound of its own on each side.

    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  rho = pi / pi_old of the token

Schulman et al. 2017 (arXiv:1707.06347), eq. 7; for language models eq. 3 of GRPO, Shao et al. 2024 (arXiv:2402.03300).
The wider upper bound ("clip higher", 0.2 and 0.28) is from DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 10.
"""

from mindspore import nn, ops

from mindrlhf.algorithms.clipping import clipped_surrogate

RATIO = "token"
KEYS = ("clip_low", "clip_high")


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, clip_low: float = 0.2, clip_high: float = 0.28):
        super().__init__(auto_prefix=False)
        self.lower, self.upper = 1.0 - clip_low, 1.0 + clip_high

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and where the bounds bite."""
        return clipped_surrogate(ops.exp(log_ratio), advantages, self.lower, self.upper)
