"""Properties of a run that follow from several sections together."""

from dataclasses import replace

from mindrlhf.algorithms import advantages, policy_losses
from mindrlhf.config.keys import RunConfig
from mindrlhf.config.training import OptimizerSection


def needs_critic(config: RunConfig) -> bool:
    """Return whether the advantages are computed with the values of a critic."""
    return "values" in advantages.find(config.algorithm.advantage).NEEDS


def correction_weight(config: RunConfig) -> str:
    """Return `correction.weight` with `auto` worked out.

    On a CPU both the generator and the training cells compute in float32 and agree to rounding: nothing is corrected,
    unless the generator's weights are older ones.
    """
    if config.correction.weight != "auto":
        return config.correction.weight
    same = config.run.device == "cpu" and config.rollout.dtype == config.model.compute_dtype
    if (same and not has_older_samples(config)) or config.correction.bypass:
        return "none"
    return "sequence" if policy_losses.traits(config.algorithm.loss).ratio == "sequence" else "token"


def has_older_samples(config: RunConfig) -> bool:
    """Return whether steps train on tokens of weights before those they begin with, by plan."""
    return config.rollout.off_policy_steps > 0 or config.rollout.segment_tokens > 0


def is_on_policy(config: RunConfig) -> bool:
    """Return whether the old log-probabilities of all samples are those that a step's only update computes itself.

    Where samples are older by plan they are: the correction accounts for the generator's weights.
    """
    is_single_update = config.training.num_minibatches * config.training.num_iterations == 1
    return is_single_update and (has_older_samples(config) or not config.algorithm.dynamic_sampling)


def skips_zero_advantages(config: RunConfig) -> bool:
    """Return whether updates leave out samples whose advantages are all 0: these have no gradient then.

    A term of the loss without advantages has one, a critic learns from all.
    """
    algorithm = config.algorithm
    return (
        config.training.skip_zero_advantages
        and policy_losses.traits(algorithm.loss).needs_advantage
        and algorithm.beta == 0
        and algorithm.entropy_coefficient == 0
        and not needs_critic(config)
    )


def is_corrected(config: RunConfig) -> bool:
    """Return whether the loss weighs or masks tokens for the mismatch between generator and trainer."""
    correction = config.correction
    masks = correction.mask != "none" or correction.veto > 0 or correction.off_policy_mask > 0
    return masks or correction_weight(config) != "none"


def reference_path(config: RunConfig) -> str:
    """Return the directory of the reference model or of the teacher; empty when the run has neither."""
    return "" if config.algorithm.beta == 0 else config.model.reference_path or config.model.path


def is_base(config: RunConfig, path: str) -> bool:
    """Return whether a reference model, in ``path`` if any, is the trained one without adapters: it takes no memory."""
    return config.lora.rank is not None and path in ("", config.model.path)


def names_reference(config: RunConfig) -> bool:
    """Return whether the run reads the model that `model.reference_path` names."""
    return config.algorithm.beta > 0 and bool(config.model.reference_path)


def critic_optimizer(config: RunConfig) -> OptimizerSection:
    """Return the critic's optimiser options: those of the actor but for the learning rate, which stays."""
    return replace(config.optimizer, start_lr=config.critic.start_lr, end_lr=config.critic.start_lr)
