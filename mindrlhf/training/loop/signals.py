"""Further reward signals for the estimators that read them: parts of rewards, and the tokens that earned them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mindrlhf.algorithms import policy_losses
from mindrlhf.algorithms.clip_cov import OPTIONS, clip_cov
from mindrlhf.algorithms.options import chosen
from mindrlhf.algorithms.overlong import soft_punishment
from mindrlhf.config.reward import REWARD_MODEL_NAME, RewardSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.rewards.registry import part_name
from mindrlhf.rollout.samples import Sample, reward_matrix


def part_weights(reward: RewardSection) -> dict[str, float]:
    """Return the weight of each part of the reward, by the name that it is reported under."""
    weights = reward.verifier_weight or (1.0,) * len(reward.verifier_function)
    found = dict(zip(map(part_name, reward.verifier_function), weights))
    return found | ({REWARD_MODEL_NAME: reward.model_weight} if reward.model_path else {})


def reward_parts(samples: Sequence[Sample], config: GrpoConfig) -> list[tuple[float, np.ndarray]]:
    """Return the summands of the rewards, each a weight and float64 [samples]."""
    algorithm, longest = config.algorithm, config.rollout.max_response_length
    weights = part_weights(config.reward)
    parts = [(weight, reward_matrix(samples, 1, name)[:, 0]) for name, weight in weights.items()]
    if algorithm.overlong_buffer:
        lengths = np.array([len(sample.completion.token_ids) for sample in samples])
        buffer = max(1, round(algorithm.overlong_buffer * longest))
        parts.append((1.0, soft_punishment(lengths, longest, buffer)))
    return parts


def steps_of(samples: Sequence[Sample], config: GrpoConfig) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return what of the rewards was given on the way, see ``step_rewards``; None where nothing was.

    Raises:
        UserError: the loss has one advantage for a whole response.
    """
    weights, loss = part_weights(config.reward), config.algorithm.loss
    found = [step_rewards(sample, weights) for sample in samples]
    if not any(len(ends) for ends, _ in found):
        return None
    if policy_losses.traits(loss).constant_advantage:
        raise UserError(
            f"'algorithm.loss' is {loss}, which treats a response as one action, but a verifier or the environment "
            "rewards its steps: set it to gspo_token or ppo_clip"
        )
    return found


def step_rewards(sample: Sample, weights: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return what of a sample's reward was given on the way: by verifiers that reward steps, or by its environment.

    Args:
        weights: of the parts of the reward, by name.

    Returns:
        Places of the last tokens of the steps, of those that the model wrote, and their weighted rewards: of its turns
        or, where one verifier rewards tokens, of all tokens. Both are empty where the reward is of the whole.
    """
    completion, reward = sample.completion, sample.reward
    given = dict(reward.steps)
    if completion.turn_rewards and reward.parts.get("environment_reward") == completion.episode_return:
        given["environment_reward"] = [value for _, value in completion.turn_rewards]
    if not given:
        return np.zeros(0, int), np.zeros(0)
    ends = turns = np.cumsum(completion.turn_lengths) - 1
    tokens = np.zeros(sample.num_generated)
    for name, values in given.items():
        places = turns if len(values) == len(turns) else np.arange(len(tokens))
        tokens[places] += weights[name] * np.asarray(values, np.float64)
        ends = ends if places is turns else places
    return ends, tokens[ends]


def clipped(advantages: Sequence[np.ndarray], samples: Sequence[Sample], config: GrpoConfig) -> list[np.ndarray]:
    """Return the advantages of a step's samples after Clip-Cov."""
    options = chosen(OPTIONS, config.algorithm.options)
    ratio, low, high = (options[f"clip_cov_{name}"] for name in ("ratio", "low", "high"))
    logprobs = [sample.completion.logprobs for sample in samples]
    return clip_cov(advantages, logprobs, ratio=ratio, low=low, high=high, seed=config.run.seed)


def each_role(
    estimate: Callable[..., list[np.ndarray]],
    config: GrpoConfig,
    samples: Sequence[Sample],
    penalties: Sequence[np.ndarray] | None,
    baselines: np.ndarray | None,
    values: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    """Return what ``estimate`` gives for the samples and what is known of each, or for the roles of agents.

    Where an agent has rewards of roles, what a role did in an episode is a sample of its own, with its own reward, and
    compared with the same role in the other episodes of the prompt.

    Returns:
        float64 [generated tokens] for each of ``samples``.

    Raises:
        UserError: the estimator compares with greedy responses, which have no rewards of roles.
    """
    agents = [sample.completion.agent for sample in samples]
    if not any(agent is not None and agent.rewards for agent in agents):
        return estimate(samples, penalties, baselines, values)
    if baselines is not None:
        raise UserError(
            f"'algorithm.advantage' is {config.algorithm.advantage}, which compares with greedy episodes, "
            "but the agent rewards roles: set it to grpo"
        )
    weight = part_weights(config.reward).get("environment_reward", 0.0)
    groups: dict[tuple[int, str], int] = {}
    parts, owners, places = [], [], []
    for index, (sample, agent) in enumerate(zip(samples, agents)):
        lengths = [int(one.is_generated.sum()) for one in agent.sequences]
        roles = np.repeat([one.role for one in agent.sequences], lengths)
        for role in dict.fromkeys(one.role for one in agent.sequences):
            group = groups.setdefault((sample.group, role), len(groups))
            parts.append(_role_sample(sample, role, group, weight))
            owners.append(index)
            places.append(np.flatnonzero(roles == role))
    penalties, values = (
        None if part is None else [part[index][at] for index, at in zip(owners, places)] for part in (penalties, values)
    )
    result = [np.zeros(sample.num_generated) for sample in samples]
    for index, at, found in zip(owners, places, estimate(parts, penalties, None, values)):
        result[index][at] = found
    return result


def _role_sample(sample: Sample, role: str, group: int, weight: float) -> Sample:
    """Return what one role did in an episode as a sample of a group of its own."""
    completion, reward, agent = sample.completion, sample.reward, sample.completion.agent
    chosen = np.repeat([one.role == role for one in agent.sequences], [len(one.token_ids) for one in agent.sequences])
    if agent.rewards:  # else the episode failed
        earned, shared = agent.rewards[role], reward.parts.get("environment_reward", 0.0)
        reward = dataclasses.replace(
            reward,
            total=reward.total + weight * (earned - shared),
            parts={**reward.parts, "environment_reward": earned},
        )
    completion = dataclasses.replace(
        completion,
        token_ids=completion.token_ids[chosen],
        logprobs=completion.logprobs[chosen[completion.is_generated]],
        is_generated=completion.is_generated[chosen],
        agent=dataclasses.replace(agent, sequences=tuple(one for one in agent.sequences if one.role == role)),
    )
    return dataclasses.replace(sample, group=group, completion=completion, reward=reward)
