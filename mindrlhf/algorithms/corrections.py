"""Correction of the mismatch between the policy that trains and the one that generated the samples: graph code.

The generator computes the same policy with other kernels and types, so that pi_old (the training cell before the
update) is not quite pi_rollout. With the ratio rho_t = pi_old / pi_rollout, the loss of each token is multiplied by a
weight w_t through which no gradient flows:

    token      min(rho_t, max_weight): truncated importance sampling, Ionides 2008; for language models Yao et al.
               2025, "Your efficient RL framework secretly brings you off-policy RL training"
    sequence   min(prod_t rho_t, max_weight): the same with the response as one action, Liu and Li 2025, "When speed
               kills stability"
    none       1

and set to 0 by a mask:

    token      where rho_t leaves [mask_low, mask_high]; with weight `token` and max_weight mask_high this is
               IcePop, Ling Team 2025, "Every step evolves" (arXiv:2510.18855), with bounds 0.5 and 5
    sequence   of responses whose prod_t rho_t leaves the bounds, Liu and Li 2025
    geometric  of responses whose (prod_t rho_t)^(1/n) leaves the bounds, Liu and Li 2025
    veto       of responses with any rho_t below ``veto``, Liu and Li 2025
    drift      of tokens of negative advantage in responses whose 1/n sum_t log(pi_rollout / pi) is above ``drift``, pi
               being the policy as it is now: off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556)

What the losses are divided by stays what it is without correction.
"""

import mindspore as ms
from mindspore import nn, ops

from mindrlhf.algorithms.sequences import sequence_means, sequence_sums

MAX_LOG_RATIO = 20.0


class RolloutCorrection(nn.Cell):
    """Weights of the tokens; see the module. ``mask`` "none", ``veto`` 0 and ``drift`` 0 leave these out.

    Args:
        weight: "none", "token" or "sequence".
        max_weight: where the weight is truncated.
        mask: "none", "token", "sequence" or "geometric".
        mask_low, mask_high: what is kept.
        veto: smallest ratio of a token that a response may have.
        drift: nats per token that a bad response may have lost.
    """

    def __init__(
        self,
        *,
        weight: str,
        max_weight: float,
        mask: str,
        mask_low: float,
        mask_high: float,
        veto: float,
        drift: float = 0.0,
    ):
        super().__init__(auto_prefix=False)
        self.weight, self.max_weight = weight, max_weight
        self.mask_mode, self.mask_low, self.mask_high = mask, mask_low, mask_high
        self.veto, self.drift = veto, drift

    def construct(self, logprobs, old_logprobs, rollout_logprobs, advantages, mask, segment_ids):
        """Return the weights, float32 [rows, length], and 1 where truncation or a mask changed them."""
        log_ratio = ops.clip_by_value((old_logprobs - rollout_logprobs) * mask, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = ops.exp(log_ratio)
        plain = self._of(self.weight, log_ratio, mask, segment_ids)
        weights = ops.clip_by_value(plain, 0.0, self.max_weight)
        if self.mask_mode != "none":
            measure = self._of(self.mask_mode, log_ratio, mask, segment_ids)
            kept = ops.logical_and(measure >= self.mask_low, measure <= self.mask_high)
            weights = weights * ops.cast(kept, ms.float32)
        if self.veto > 0:
            refused = ops.cast(ratio < self.veto, ms.float32) * mask
            weights = weights * ops.cast(sequence_sums(refused, segment_ids) == 0, ms.float32)
        if self.drift > 0:
            lost = sequence_means(rollout_logprobs - logprobs, mask, segment_ids)
            refused = ops.logical_and(lost > self.drift, advantages < 0)
            weights = weights * (1.0 - ops.cast(refused, ms.float32))
        changed = ops.cast(weights != plain, ms.float32) * mask
        return ops.stop_gradient(weights), ops.stop_gradient(changed)

    def _of(self, level, log_ratio, mask, segment_ids):
        """Return the ratio at a level, float32 [rows, length]."""
        if level == "token":
            return ops.exp(log_ratio)
        if level == "sequence":
            total = sequence_sums(log_ratio, segment_ids)
            return ops.exp(ops.clip_by_value(total, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        if level == "geometric":
            return ops.exp(sequence_means(log_ratio, mask, segment_ids))
        return ops.ones_like(log_ratio)
