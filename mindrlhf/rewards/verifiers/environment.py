"""The reward that the environment gave."""

import math

from mindrlhf.rewards.registry import register


@register
def environment_reward(completion: str, answer: str, *, episode_return: float | None) -> float:
    """The sum of the rewards that the environment of ``tools.environment`` gave for the actions of the response.

    Raises:
        ValueError: the run has no environment, or the episode broke down.
    """
    if episode_return is None:
        raise ValueError("there is no environment: set tools.environment")
    if math.isnan(episode_return):
        raise ValueError("the environment broke down in this episode: see the log")
    return episode_return
