"""All tokens but some as one more: graph code."""

from mindspore import ops

from mindrlhf.algorithms.head import LEAST_REST


def with_rest(logprobs):
    """Return log-probabilities [..., k], float32, with that of all other tokens as the last of k + 1.

    It has a gradient, but none where it is at ``LEAST_REST``.
    """
    rest = 1.0 - ops.ReduceSum(keep_dims=True)(ops.exp(logprobs), -1)
    return ops.concat((logprobs, ops.log(ops.maximum(rest, ops.full_like(rest, LEAST_REST)))), -1)
