"""Losses of a micro-batch as graph cells.

Every loss is a sum over tokens divided by a count given from outside (the response tokens of the whole
optimiser update, over all ranks and micro-batches), so that it does not depend on how a batch is cut.
"""

from collections.abc import Mapping

import numpy as np
from mindspore import nn, ops

# The sums that a policy loss reports beside its value, in the order of its statistics vector. All but the
# first are to be divided by the token count.
POLICY_STATISTICS = ("loss", "clipped_low", "clipped_high", "kl", "entropy", "correction", "corrected")

# The token arrays that a policy loss takes, in order; those it does not need are unread.
POLICY_INPUTS = ("advantages", "weights", "old_logprobs", "reference_logprobs", "rollout_logprobs")

# The sums that the other losses here report, and the token arrays that they take.
TOKEN_STATISTICS = ("loss", "entropy")
COEFFICIENT_INPUTS = ("coefficients",)

MOST_INPUTS = 6  # token arrays that a loss may read: an NPU's function of local shards takes no *args
MAX_LOG_RATIO = 20.0
# exp(20) is 5e8: beyond it k3 of a token would drown, and soon overflow, everything else.
MAX_DIFFERENCE = 20.0


class Loss(nn.Cell):
    """The sum of something over tokens, divided by a count; see ``construct`` for what every loss takes and returns.

    Args:
        policy: what the model says of each token, :class:`mindrlhf.algorithms.logprobs.PolicyLogProbs` or
            :class:`mindrlhf.algorithms.scores.TokenScores`.

    Attributes:
        inputs: names of the token arrays that it reads beside the four of every cell, in order.
        statistics: names of the sums that it reports, in order; the first is the loss.
    """

    inputs: tuple[str, ...] = ()
    statistics = TOKEN_STATISTICS

    def __init__(self, policy, entropy_coefficient: float = 0.0):
        super().__init__(auto_prefix=False)
        assert len(self.inputs) <= MOST_INPUTS, f"{type(self).__name__} reads {len(self.inputs)} token arrays"
        self.policy = policy
        self.entropy_coefficient = entropy_coefficient
        if not entropy_coefficient and hasattr(policy, "leave_entropy"):
            policy.leave_entropy()

    def token_arrays(self, tokens: Mapping[str, np.ndarray], mask: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of ``inputs``: those of ``tokens``, or zeros like the mask, float32 [rows, length]."""
        unread = np.zeros_like(mask)
        return [tokens.get(name, unread) for name in self.inputs]

    def construct(self, input_ids, segment_ids, labels, mask, *given):
        """Return the loss, its ``statistics`` and the outputs of the policy, [rows, length].

        ``given`` are the arrays of ``inputs``, then ``kl_coefficient`` and ``num_tokens``, T: float32 scalars. All
        arrays are [rows, length], float32 but for the ids.
        """
        outputs = self.policy(input_ids, segment_ids, labels, mask)
        loss, statistics = self.of(outputs, mask, segment_ids, given)
        return loss, ops.stop_gradient(statistics), ops.stop_gradient(outputs[0])

    def of(self, outputs, mask, segment_ids, given):
        """Return the loss and its statistics, from what the policy returns: outputs and entropies."""
        raise NotImplementedError


class PolicyLoss(Loss):
    """The loss of reinforcement learning, put together from its parts:

        1 / T sum_t weight_t (correction_t surrogate_t + kl_coefficient kl_t - entropy_coefficient entropy_t)

    over the response tokens, of which the whole optimiser update has T. The weights are the aggregation
    (:mod:`mindrlhf.algorithms.aggregation`); the surrogate is one of :mod:`mindrlhf.algorithms.policy_losses`.

    Args:
        policy: :class:`mindrlhf.algorithms.logprobs.PolicyLogProbs`.
        surrogate: the policy loss.
        on_policy: the update is the first on these samples, so the old log-probabilities are the ones
            just computed: the ratio is exactly 1 and ``old_logprobs`` is unread.
        kl_estimator: "k1", "k2", "k3" or "abs"; "" leaves the term out and ``reference_logprobs`` unread.
        kl_unbiased: weigh the estimate by the ratio to the old policy; see :func:`kl_per_token`.
        entropy_coefficient: bonus for entropy.
        correction: :class:`mindrlhf.algorithms.corrections.RolloutCorrection`; None leaves it out and
            ``rollout_logprobs`` unread.
    """

    inputs, statistics = POLICY_INPUTS, POLICY_STATISTICS

    def __init__(
        self,
        policy,
        surrogate: nn.Cell,
        *,
        on_policy: bool,
        kl_estimator: str = "",
        kl_unbiased: bool = False,
        entropy_coefficient: float = 0.0,
        correction: nn.Cell | None = None,
    ):
        super().__init__(policy, entropy_coefficient)
        self.surrogate = surrogate
        self.on_policy = on_policy
        self.kl_estimator = kl_estimator
        self.kl_unbiased = kl_unbiased
        self.correction = correction
        self.further = tuple(POLICY_INPUTS.index(name) for name in getattr(surrogate, "reads", ()))

    def of(self, outputs, mask, segment_ids, given):
        """See :meth:`Loss.of`; the weights among ``given`` are 0 outside the mask."""
        per_token, parts = self.per_token(outputs[0], outputs[1], mask, segment_ids, given)
        return self.total(per_token, parts, given[1], mask, given[-1])

    def per_token(self, logprobs, entropy, mask, segment_ids, given):
        """Return the loss of each token without its weight, and what the statistics sum up, [rows, length] each."""
        advantages, _, old_logprobs, reference_logprobs, rollout_logprobs = given[:5]
        kl_coefficient = given[-2]
        old_logprobs = ops.stop_gradient(logprobs) if self.on_policy else old_logprobs
        # Bounded: far beyond any clip, and exp of more would overflow and turn the vanished gradient into NaN.
        log_ratio = ops.clip_by_value((logprobs - old_logprobs) * mask, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        further = [given[index] for index in self.further]
        per_token, low, high = self.surrogate(logprobs, log_ratio, advantages, mask, segment_ids, *further)
        correction, corrected, kl = mask, ops.zeros_like(mask), ops.zeros_like(mask)
        if self.correction is not None:
            arrays = (logprobs, old_logprobs, rollout_logprobs, advantages, mask, segment_ids)
            correction, corrected = self.correction(*arrays)
            per_token = per_token * correction
        if self.kl_estimator:
            kl = kl_per_token(logprobs, reference_logprobs, self.kl_estimator) * mask
            term = kl * ops.exp(log_ratio) if self.kl_unbiased else kl
            per_token = per_token + kl_coefficient * term
        if self.entropy_coefficient:
            per_token = per_token - self.entropy_coefficient * entropy
        return per_token, (low, high, kl, entropy, correction, corrected)

    def total(self, per_token, parts, weights, mask, num_tokens):
        """Return the loss of all tokens, and the statistics: the loss, and the sum of each part."""
        loss = (per_token * weights).sum() / num_tokens
        sums = [(values * mask).sum() for values in parts]
        return loss, ops.stack((loss, *sums))


class SupervisedLoss(Loss):
    """Mean negative log-likelihood of the response tokens."""

    def of(self, outputs, mask, segment_ids, given):
        loss = -(outputs[0] * mask).sum() / given[-1]
        return loss, ops.stack((loss, outputs[1].sum()))


class CoefficientLoss(Loss):
    """sum_t c_t y_t over the outputs y of a policy: its gradient is that of any loss whose derivative is dL/dy_t = c_t.

    For losses of whole sequences or pairs, whose derivatives the host computes from the outputs of a first pass.
    """

    inputs = COEFFICIENT_INPUTS

    def of(self, outputs, mask, segment_ids, given):
        loss = (given[0] * outputs[0] * mask).sum() / given[-1]
        return loss, ops.stack((loss, outputs[1].sum()))


def kl_per_token(logprobs, reference_logprobs, estimator):
    """Return estimates of KL(policy || reference) of each token; ``estimator`` is a constant of the graph.

    With d = logprobs - reference_logprobs of tokens that the policy sampled (Schulman 2020, "Approximating KL
    divergence"):

        k1 = d                   value unbiased; the gradient has mean 0, so it regularises only when made unbiased
        k2 = d^2 / 2             value biased; the gradient is that of the KL divergence, on policy
        k3 = exp(-d) - 1 + d     value unbiased, never negative; the gradient is that of KL(reference || policy), on
                                 policy; Shao et al. 2024 (arXiv:2402.03300), eq. 4
        abs = |d|                a distance, with gradients of one size

    The unbiased variant multiplies the estimate by the importance ratio pi / pi_old, through which the gradient flows
    too. The expectation over samples of pi_old is then the KL divergence, and its gradient that of the KL divergence:
    DeepSeek-V3.2 (arXiv:2512.02556), eq. 7. That holds for k1 and k3, whose values are unbiased.
    """
    difference = reference_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference * difference * 0.5
    if estimator == "abs":
        return ops.abs(difference)
    difference = ops.minimum(difference, ops.full_like(difference, MAX_DIFFERENCE))
    return ops.exp(difference) - difference - 1.0
