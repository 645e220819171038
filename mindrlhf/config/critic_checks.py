"""Rules between the critic's keys and the others."""

import dataclasses

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import Mistakes, UserError


def check_critic(config: GrpoConfig, given: frozenset[str]) -> None:
    """Check the section `critic`; ``given`` are the keys the user set."""
    critic, advantage = config.critic, config.algorithm.advantage
    if not needs_critic(config):
        _check_unread(config, given)
        return
    if not critic.path:
        raise UserError(
            f"'critic.path' is empty, but the advantages of {advantage} need a critic: set it to a reward model, or to "
            f"model.path ({config.model.path}) to begin with the actor's layers, or set 'algorithm.advantage' to an "
            "estimator without a critic, such as grpo or reinforce_pp"
        )
    is_constant = config.optimizer.lr_schedule == "constant"
    if is_constant and critic.end_lr is not None and critic.end_lr != critic.start_lr:
        raise UserError(
            f"'critic.end_lr' is {critic.end_lr:g}, but optimizer.lr_schedule=constant never reaches it: remove it, or "
            "set lr_schedule to linear or cosine"
        )


def _check_unread(config: GrpoConfig, given: frozenset[str]) -> None:
    mistakes = Mistakes()
    for field in dataclasses.fields(config.critic):
        name = f"critic.{field.name}"
        # What a run wrote to its config.yaml holds every key, and must load again.
        if name in given and getattr(config.critic, field.name) != field.default:
            mistakes.add(
                f"'{name}' is set, but the advantages of {config.algorithm.advantage} use no critic: remove it, or set "
                "algorithm.name to ppo"
            )
    mistakes.raise_if_any()
