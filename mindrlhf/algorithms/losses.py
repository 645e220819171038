"""Losses of a micro-batch as graph cells.

Every loss is a sum over tokens divided by a count given from outside (the response tokens of the whole
optimiser update, over all ranks and micro-batches), so that it does not depend on how a batch is cut.
"""

import mindspore as ms
from mindspore import nn, ops

# The sums that a policy loss reports beside its value, in the order of its statistics vector. All but the
# first are to be divided by the token count.
POLICY_STATISTICS = ("loss", "clipped_low", "clipped_high", "kl", "entropy")

MAX_LOG_RATIO = 20.0


def k3(logprobs, reference_logprobs):
    """Return the k3 estimate of KL(policy || reference) per token: exp(d) - d - 1, d = reference - policy.

    Schulman 2020, "Approximating KL divergence"; eq. 4 of Shao et al. 2024 (arXiv:2402.03300).
    """
    difference = reference_logprobs - logprobs
    return ops.exp(difference) - difference - 1.0


class GrpoLoss(nn.Cell):
    """Clipped policy gradient with an asymmetric clip and an optional KL term.

    Per response token, with the ratio rho = exp(logp - old_logp):

        -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + beta * k3(logp, reference_logp)

    Shao et al. 2024 (arXiv:2402.03300), eq. 3; the asymmetric clip and the mean over all tokens of the batch are
    from DAPO, Yu et al. 2025 (arXiv:2503.14476), eq. 8 and 10.

    Args:
        policy: :class:`mindrlhf.algorithms.logprobs.PolicyLogProbs`.
        clip_low, clip_high: widths of the clip.
        beta: weight of the KL term; 0 leaves it out and ``reference_logprobs`` unread.
        on_policy: the update is the first on these samples, so the old log-probabilities are the ones
            just computed: the ratio is exactly 1 and ``old_logprobs`` is unread.
    """

    def __init__(self, policy, *, clip_low: float, clip_high: float, beta: float, on_policy: bool):
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.lower, self.upper = 1.0 - clip_low, 1.0 + clip_high
        self.beta = beta
        self.on_policy = on_policy

    def construct(self, input_ids, segment_ids, labels, mask, advantages, old_logprobs, reference_logprobs, num_tokens):
        """Return the loss, its statistics [5] (see ``POLICY_STATISTICS``) and the log-probabilities.

        All arrays are [rows, length]; ``num_tokens`` is a float32 scalar: the response tokens of the update.
        """
        logprobs, entropy = self.policy(input_ids, segment_ids, labels, mask)
        old_logprobs = ops.stop_gradient(logprobs) if self.on_policy else old_logprobs
        # Bounded: far beyond any clip, and exp of more would overflow and turn the vanished gradient into NaN.
        ratio = ops.exp(ops.clip_by_value((logprobs - old_logprobs) * mask, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        # A clip bites only where it lowers the objective: that is where the gradient vanishes. Written with masks,
        # since the gradient of a minimum is split where both sides are equal, as they are at ratio 1.
        low = ops.logical_and(ratio < self.lower, advantages < 0)
        high = ops.logical_and(ratio > self.upper, advantages > 0)
        clipped = ops.stop_gradient(ops.clip_by_value(ratio, self.lower, self.upper))
        per_token = -advantages * ops.select(ops.logical_or(low, high), clipped, ratio)
        kl = ops.zeros_like(mask)
        if self.beta > 0:
            kl = k3(logprobs, reference_logprobs) * mask
            per_token = per_token + self.beta * kl
        loss = (per_token * mask).sum() / num_tokens
        low, high = ops.cast(low, ms.float32) * mask, ops.cast(high, ms.float32) * mask
        statistics = ops.stack((loss, low.sum(), high.sum(), kl.sum(), entropy.sum()))
        return loss, ops.stop_gradient(statistics), ops.stop_gradient(logprobs)


class SupervisedLoss(nn.Cell):
    """Mean negative log-likelihood of the response tokens."""

    def __init__(self, policy):
        super().__init__(auto_prefix=False)
        self.policy = policy

    def construct(self, input_ids, segment_ids, labels, mask, num_tokens):
        """Return the loss, its statistics [2] (loss, entropy sum) and the log-probabilities [rows, length]."""
        logprobs, entropy = self.policy(input_ids, segment_ids, labels, mask)
        loss = -(logprobs * mask).sum() / num_tokens
        return loss, ops.stop_gradient(ops.stack((loss, entropy.sum()))), ops.stop_gradient(logprobs)
