"""VESPO: a smooth weight on each response's gradient, by the whole response's ratio.

    -sg(W^k exp(lambda (1 - W))) A log pi,  W = prod_t pi / pi_old of the response

with sg to stop gradients, and k and lambda by the sign of A: Shen et al. 2026 (arXiv:2602.10693), section 3.4, with 2
and 3 for good responses, 3 and 2 for others. The weight is 1 at W = 1. The advantages must be constant within a
response. Nothing is clipped, so nothing is counted.
"""

from mindspore import nn, ops

from mindrlhf.algorithms.sequences import sequence_sums

RATIO = "sequence"
OPTIONS = {
    "vespo_k_positive": (2.0, 0.0, None, "exponent k where the advantage is positive"),
    "vespo_lambda_positive": (3.0, 0.0, None, "decay lambda where the advantage is positive"),
    "vespo_k_negative": (3.0, 0.0, None, "exponent k elsewhere"),
    "vespo_lambda_negative": (2.0, 0.0, None, "decay lambda elsewhere"),
}
CONSTANT_ADVANTAGE = True

MAX_LOG_RATIO = 20.0


class Surrogate(nn.Cell):
    """See the module, and the package for the arguments."""

    def __init__(
        self,
        *,
        vespo_k_positive: float = 2.0,
        vespo_lambda_positive: float = 3.0,
        vespo_k_negative: float = 3.0,
        vespo_lambda_negative: float = 2.0,
    ):
        super().__init__(auto_prefix=False)
        self.positive = (vespo_k_positive, vespo_lambda_positive)
        self.negative = (vespo_k_negative, vespo_lambda_negative)

    def construct(self, logprobs, log_ratio, advantages, mask, segment_ids):
        """Return the loss of each token, and zeros."""
        total = ops.clip_by_value(sequence_sums(log_ratio, segment_ids), -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = ops.exp(total)
        good = self.positive[0] * total + self.positive[1] * (1.0 - ratio)
        bad = self.negative[0] * total + self.negative[1] * (1.0 - ratio)
        weights = ops.stop_gradient(ops.exp(ops.select(advantages < 0, bad, good)))
        return -weights * advantages * logprobs, ops.zeros_like(mask), ops.zeros_like(mask)
