"""The loss cell of a run, and what it is over, put together from the config."""

from functools import partial

from mindrlhf.algorithms import policy_losses
from mindrlhf.algorithms.corrections import RolloutCorrection
from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import PolicyLoss
from mindrlhf.algorithms.options import chosen
from mindrlhf.algorithms.top_k.cells import TopKLogProbs, TopTokens
from mindrlhf.algorithms.top_k.loss import TopKPolicyLoss
from mindrlhf.config.derived import correction_weight, is_corrected, is_on_policy
from mindrlhf.config.schema import GrpoConfig


def build_policy_loss(config: GrpoConfig, policy) -> PolicyLoss:
    """Return the loss of a run over ``policy``, see :func:`build_policy_logprobs`."""
    algorithm = config.algorithm
    traits = policy_losses.traits(algorithm.loss)
    options = {name: getattr(algorithm, name) for name in traits.keys} | chosen(traits.options, algorithm.options)
    make = partial(TopKPolicyLoss, k=algorithm.distill_top_k) if algorithm.distill_top_k else PolicyLoss
    return make(
        policy,
        policy_losses.surrogate(algorithm.loss, **options),
        on_policy=is_on_policy(config) and not config.correction.bypass,
        kl_estimator=algorithm.kl_estimator if algorithm.beta > 0 and algorithm.kl_in == "loss" else "",
        kl_unbiased=algorithm.kl_unbiased,
        entropy_coefficient=algorithm.entropy_coefficient,
        correction=_build_correction(config) if is_corrected(config) else None,
    )


def build_policy_logprobs(config: GrpoConfig, network) -> PolicyLogProbs:
    """Return the log-probabilities of a whole model that is trained."""
    kind = TopKLogProbs if config.algorithm.distill_top_k else PolicyLogProbs
    return kind(network, config.rollout.temperature, config.run.device, config.memory.head_tile)


def build_top_tokens(config: GrpoConfig, policy: PolicyLogProbs, vocab_size: int) -> TopTokens | None:
    """Return what finds the top-k tokens of a teacher; None where it is not asked for them.

    Args:
        policy: its log-probabilities.
        vocab_size: of the student. A teacher's vocabulary may have been padded to more.
    """
    if not config.algorithm.distill_top_k:
        return None
    vocab_size = min(vocab_size, policy.model.dims.vocab_size)
    return TopTokens(policy, config.algorithm.distill_top_k, vocab_size, config.memory.head_tile)


def _build_correction(config: GrpoConfig) -> RolloutCorrection:
    correction = config.correction
    return RolloutCorrection(
        weight=correction_weight(config),
        max_weight=correction.max_weight,
        mask=correction.mask,
        mask_low=correction.mask_low,
        mask_high=correction.mask_high,
        veto=correction.veto,
        drift=correction.off_policy_mask,
    )
