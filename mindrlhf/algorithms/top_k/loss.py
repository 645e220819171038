"""The loss of distillation from a teacher's top-k tokens: graph code.

At each position of a response that the student has written, S are the teacher's top-k tokens, and all
other tokens are one: with r = 1 - sum_{v in S} p(v),

    KL = sum_{v in S} p_s(v) (log p_s(v) - log p_t(v)) + r_s (log r_s - log r_t)

is the reverse KL of the student s against the teacher t once the other tokens are merged. By the log-sum inequality
(Cover and Thomas 2006, Elements of Information Theory, theorem 2.7.1; the data-processing inequality of that merging)
it is never above the whole reverse KL, and grows with K. At K = V - 1 nothing is merged, and it is equal.

Learning from the teacher's distributions on the student's own samples, with reverse KL as one choice, is generalised
knowledge distillation: Agarwal et al. 2024 (arXiv:2306.13649), section 3, where as here no gradient goes through the
sampling. Gu et al. 2024 (arXiv:2306.08543), eq. 1, minimise the reverse KL too; the single-step part of their eq. 3 is
a sum over all tokens. :mod:`mindrlhf.algorithms.advantages.distill` estimates its gradient from the sampled token.
"""

import numpy as np
from mindspore import ops

from mindrlhf.algorithms.losses import POLICY_INPUTS, POLICY_STATISTICS, PolicyLoss

# What rows call the teacher's tokens, int32 [rows, length, K], and their log-probabilities, float32
# [rows, length, K + 1], of which the last is that of all other tokens together.
TEACHER_TOKENS, TEACHER_LOGPROBS = "teacher_tokens", "teacher_logprobs"
# What the loss reports after POLICY_STATISTICS: sums over tokens of the KL, and of the probability of the K tokens.
TOP_K_STATISTICS = ("topk_kl", "teacher_mass", "student_mass")


def merged_kl(logprobs, teacher_logprobs):
    """Return KL, mass of the K tokens under the student, and under the teacher, float32 [rows, length] each.

    The mass of the other tokens is never below ``LEAST_REST``, so that a teacher that
    has less than that for them penalises a student as if it had that much.

    Args:
        logprobs: of the student, float32 [rows, length, K + 1], the last of all other tokens together; the gradient
            flows through it.
        teacher_logprobs: of the same.
    """
    probs = ops.exp(logprobs)
    kl = (probs * (logprobs - teacher_logprobs)).sum(-1)
    return kl, 1.0 - probs[:, :, -1], 1.0 - ops.exp(teacher_logprobs[:, :, -1])


class TopKPolicyLoss(PolicyLoss):
    """The loss of a policy, and beside it ``kl_coefficient`` times the KL against the teacher's top-k tokens.

    The policy loss is that of the advantages, which have no part of the teacher: those of the rewards, or 0. The KL is
    of the tokens that might follow at a position, whoever wrote what is before it, so the correction for samples of
    older weights leaves it as it is.

    Args:
        k: number of tokens.
        others: of :class:`mindrlhf.algorithms.losses.PolicyLoss`, over a
            :class:`mindrlhf.algorithms.top_k.cells.TopKLogProbs`.
    """

    inputs = (*POLICY_INPUTS, TEACHER_TOKENS, TEACHER_LOGPROBS)
    statistics = (*POLICY_STATISTICS, *TOP_K_STATISTICS)

    def __init__(self, policy, surrogate, k: int, **others):
        super().__init__(policy, surrogate, **others)
        self.k = k

    def token_arrays(self, tokens, mask) -> list[np.ndarray]:
        """See :meth:`Loss.token_arrays`; the teacher's two have an axis of tokens."""
        unread = {TEACHER_TOKENS: np.zeros((*mask.shape, self.k), np.int32)}
        unread[TEACHER_LOGPROBS] = np.zeros((*mask.shape, self.k + 1), np.float32)
        return super().token_arrays({**unread, **tokens}, mask)

    def construct(self, input_ids, segment_ids, labels, mask, *given):
        """See :meth:`Loss.construct`: the policy is asked for the teacher's tokens too."""
        outputs = self.policy(input_ids, segment_ids, labels, mask, given[-4])
        loss, statistics = self.of(outputs, mask, segment_ids, given)
        return loss, ops.stop_gradient(statistics), ops.stop_gradient(outputs[0])

    def of(self, outputs, mask, segment_ids, given):
        """See :meth:`PolicyLoss.of`; the log-probabilities of the teacher's tokens come third."""
        logprobs, entropy, top_k_logprobs = outputs
        _, teacher_logprobs, kl_coefficient, num_tokens = given[-4:]
        per_token, parts = self.per_token(logprobs, entropy, mask, segment_ids, given)
        kl, mass, teacher_mass = merged_kl(top_k_logprobs, teacher_logprobs)
        per_token = per_token + kl_coefficient * kl
        return self.total(per_token, (*parts, kl, teacher_mass, mass), given[1], mask, num_tokens)
