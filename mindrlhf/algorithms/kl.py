"""Estimates of KL(policy || reference) per token, with gradients: graph code.

With d = logprobs - reference_logprobs of tokens that the policy sampled (Schulman 2020, "Approximating KL divergence"):

    k1 = d                   value unbiased; the gradient has mean 0, so it regularises only when made unbiased
    k2 = d^2 / 2             value biased; the gradient is that of the KL divergence, on policy
    k3 = exp(-d) - 1 + d     value unbiased, never negative; the gradient is that of KL(reference || policy), on policy;
                             Shao et al. 2024 (arXiv:2402.03300), eq. 4
    abs = |d|                a distance, with gradients of one size

The unbiased variant multiplies the estimate by the importance ratio pi / pi_old, through which the gradient flows too.
The expectation over samples of pi_old is then the KL divergence, and its gradient that of the KL divergence:
DeepSeek-V3.2 (arXiv:2512.02556), eq. 7. That holds for k1 and k3, whose values are unbiased.
"""

from mindspore import ops

# exp(20) is 5e8: beyond it k3 of a token would drown, and soon overflow, everything else.
MAX_DIFFERENCE = 20.0


def kl_per_token(logprobs, reference_logprobs, estimator):
    """Return the estimate, float32 of the shape of its arguments; ``estimator`` is a constant of the graph."""
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference * difference * 0.5
    if estimator == "abs":
        return ops.abs(difference)
    difference = ops.minimum(difference, ops.full_like(difference, MAX_DIFFERENCE))
    return ops.exp(difference) - difference - 1.0
