"""SAPO: a soft gate in place of the clip.

    -4 / tau sigmoid(tau (rho - 1)) A,  tau = sapo_tau_positive where A > 0, else sapo_tau_negative

with rho = pi / pi_old of the token: Gao et al. 2025 (arXiv:2511.20347), with temperatures 1.0 and 1.05.
The gradient at ratio 1 is that of -rho A, and fades away from it. The paper means over tokens, then over responses
(`sequence_mean`). Nothing is clipped, so nothing is counted.
"""

from mindspore import nn, ops

RATIO = "token"
OPTIONS = {
    "sapo_tau_positive": (1.0, 1e-6, None, "temperature where the advantage is positive"),
    "sapo_tau_negative": (1.05, 1e-6, None, "temperature elsewhere"),
}


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(self, *, sapo_tau_positive: float = 1.0, sapo_tau_negative: float = 1.05):
        super().__init__(auto_prefix=False)
        self.positive, self.negative = sapo_tau_positive, sapo_tau_negative

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and zeros."""
        tau = ops.select(advantages > 0, ops.full_like(mask, self.positive), ops.full_like(mask, self.negative))
        losses = -ops.sigmoid(tau * (ops.exp(log_ratio) - 1.0)) * 4.0 / tau * advantages
        return losses, ops.zeros_like(mask), ops.zeros_like(mask)
