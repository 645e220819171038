"""The loss cell of a run, and what it is over, put together from the config."""

from mindrlhf.algorithms import policy_losses
from mindrlhf.algorithms.corrections import RolloutCorrection
from mindrlhf.algorithms.kl_control import UNBIASED_ESTIMATORS
from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import PolicyLoss
from mindrlhf.algorithms.options import chosen
from mindrlhf.config.derived import correction_weight, is_corrected, is_on_policy
from mindrlhf.config.schema import GrpoConfig


def build_policy_loss(config: GrpoConfig, policy) -> PolicyLoss:
    """Return the loss of a run over ``policy``, see :func:`build_policy_logprobs`."""
    algorithm = config.algorithm
    traits, estimator = policy_losses.traits(algorithm.loss), algorithm.kl_estimator
    options = {name: getattr(algorithm, name) for name in traits.keys} | chosen(traits.options, algorithm.options)
    return PolicyLoss(
        policy,
        policy_losses.surrogate(algorithm.loss, **options),
        on_policy=is_on_policy(config) and not config.correction.bypass,
        kl_estimator=estimator.removesuffix("+") if algorithm.beta > 0 and algorithm.kl_in == "loss" else "",
        kl_unbiased=estimator in UNBIASED_ESTIMATORS,
        entropy_coefficient=algorithm.entropy_coefficient,
        correction=_build_correction(config) if is_corrected(config) else None,
    )


def build_policy_logprobs(config: GrpoConfig, network) -> PolicyLogProbs:
    """Return the log-probabilities of a whole model that is trained."""
    return PolicyLogProbs(network, config.rollout.temperature, config.run.device, config.memory.logit_tile)


def _build_correction(config: GrpoConfig) -> RolloutCorrection:
    correction = config.correction
    return RolloutCorrection(
        weight=correction_weight(config),
        max_weight=correction.max_weight,
        mask=correction.mask,
        mask_low=correction.mask_bounds[0],
        mask_high=correction.mask_bounds[1],
        veto=correction.veto,
        drift=correction.off_policy_mask,
    )
