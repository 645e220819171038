"""The host's part of the algorithm over scored samples, by hand."""

import dataclasses

import numpy as np
import pytest
from configs import grpo_config
from made_samples import make_sample, with_completion, with_reward

from mindrlhf.config.reward import RewardSection
from mindrlhf.errors import UserError
from mindrlhf.training.loop.objective import Objective

MAX_LENGTH = 10


def sample(reward, length, group=0, finish_reason="stop"):
    logprobs = np.linspace(-1.0, -2.0, length).astype(np.float32)
    ids = np.arange(1, length + 1, dtype=np.int32)
    return make_sample(ids[:1], ids, reward, group=group, logprobs=logprobs, finish_reason=finish_reason)


SAMPLES = [sample(1.0, 2), sample(0.0, 9), sample(0.5, 10, 1, "length"), sample(0.5, 3, 1)]


def objective(correction=None, training=None, **algorithm):
    return Objective(
        grpo_config(
            rollout={"max_response_length": MAX_LENGTH},
            algorithm=algorithm,
            correction=correction or {},
            training=training or {},
        )
    )


def test_the_plain_objective_takes_the_rewards_and_weighs_all_tokens_alike():
    plain = objective()
    np.testing.assert_array_equal(plain.rewards(SAMPLES), [1.0, 0.0, 0.5, 0.5])
    for (sequence,), each in zip(plain.sequences(SAMPLES), SAMPLES, strict=True):
        assert sequence.values.keys() == {"weights"}
        np.testing.assert_array_equal(sequence.values["weights"], np.ones(len(each.completion.token_ids), np.float32))
    parts = plain.advantages(SAMPLES)
    np.testing.assert_allclose([part[0] for part in parts], [0.5**0.5, -(0.5**0.5), 0, 0], rtol=1e-5)
    assert [len(part) for part in parts] == [2, 9, 10, 3]
    assert not (plain.needs_reference or plain.needs_old_logprobs or plain.needs_greedy or plain.is_corrected)


def test_long_responses_lose_reward():
    # The last 4 of 10 tokens: 9 tokens lose 3/4 and 10 tokens all of the penalty of 1.
    shaped = objective(overlong_buffer=0.4)
    np.testing.assert_allclose(shaped.rewards(SAMPLES), [1.0, -0.75, -0.5, 0.5])
    np.testing.assert_allclose([part[0] for part in shaped.advantages(SAMPLES)][2:], [-(0.5**0.5), 0.5**0.5], rtol=1e-5)


def test_cut_responses_are_filtered_out_of_the_loss_but_stay_in_the_baseline():
    filtered = objective(overlong_filter=True, aggregation="sequence_mean")
    weights = [sequence.values["weights"] for (sequence,) in filtered.sequences(SAMPLES)]
    # 24 tokens; three responses are left.
    np.testing.assert_allclose([part[0] for part in weights], [24 / (3 * 2), 24 / (3 * 9), 0.0, 24 / (3 * 3)])
    assert filtered.advantages(SAMPLES)[3][0] == 0.0


def test_rewards_normalised_apart_are_those_of_each_verifier_by_weight():
    """GDPO by hand: in a group of two, a part that differs gives +-1/sqrt(2), whatever its scale."""
    rewards = RewardSection(verifier_function=("length", "half"), verifier_weight=(1.0, 3.0))
    one = objective(advantage="gdpo", overlong_buffer=0.4)
    gdpo = Objective(dataclasses.replace(one._config, reward=rewards))
    parts = [{"length": 5.0, "half": 0.0}, {"length": 1.0, "half": 0.1}, {"length": 2.0}, {"length": 2.0}]
    samples = [
        with_reward(with_completion(sample(0.0, 2, group), token_ids=np.arange(length)), parts=part)
        for group, length, part in zip((0, 0, 1, 1), (2, 2, 2, 10), parts)
    ]
    # 1 - 3 and its opposite; the last loses 1 to its length alone: over the standard deviation of the four.
    sums = np.array([-2.0, 2.0, 1.0, -1.0]) / 2**0.5
    expected = sums / np.std(sums, ddof=1)
    np.testing.assert_allclose([part[0] for part in gdpo.advantages(samples)], expected, rtol=1e-4)


def test_tokens_of_high_covariance_are_left_out_of_the_loss():
    """Of 24 tokens 12 of those whose covariance is positive; the rest keep what they had."""
    plain = np.concatenate(objective().advantages(SAMPLES))
    found = objective(options={"clip_cov_ratio": 0.5, "clip_cov_low": 1e-9}).advantages(SAMPLES)
    assert [len(part) for part in found] == [2, 9, 10, 3]
    changed = np.concatenate(found) != plain
    logprobs = np.concatenate([one.completion.logprobs for one in SAMPLES]).astype(float)
    positive = (logprobs - logprobs.mean()) * (plain - plain.mean()) > 1e-9
    assert 0 < changed.sum() <= 12 and positive[changed].all() and not np.concatenate(found)[changed].any()


def stepped(group, rewards, **more):
    turns = tuple((2, reward) for reward in rewards)
    one = sample(sum(rewards) + 1.0, 2 * len(rewards), group)
    one = with_completion(one, turn_rewards=turns, episode_return=sum(rewards), **more)
    return with_reward(one, parts={"environment_reward": sum(rewards), "length": 1.0})


def in_environment(**algorithm):
    plain = objective(**algorithm)
    reward = RewardSection(verifier_function=("environment_reward", "length"))
    return Objective(dataclasses.replace(plain._config, reward=reward))


def test_turns_earn_what_came_of_them_and_what_came_later():
    samples = [stepped(0, [3.0, -1.0]), stepped(0, [0.0])]
    # To go: 3 - 1 + 1 before the first turn, -1 + 1 before the second, and 0 + 1; whitened over six tokens.
    to_go = np.array([3.0, 3.0, 0.0, 0.0, 1.0, 1.0])
    expected = (to_go - to_go.mean()) / to_go.std()
    found = np.concatenate(in_environment(advantage="reinforce_pp").advantages(samples))
    np.testing.assert_allclose(found, expected)
    # Rewards of turns 3, 0 (-1 and 1 of the whole response) and 1: mean 4/3.
    turns = np.array([3.0, 0.0, 1.0])
    normalised = (turns - turns.mean()) / turns.std(ddof=1)
    expected = np.repeat([normalised[0] + normalised[1], normalised[1], normalised[2]], 2)
    found = np.concatenate(in_environment(advantage="turn_grpo").advantages(samples))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # GRPO takes each response as a whole.
    found = in_environment().advantages(samples)
    np.testing.assert_allclose([part[0] for part in found], [0.5**0.5, -(0.5**0.5)], rtol=1e-5)


def test_rewards_of_steps_need_a_loss_of_tokens():
    with pytest.raises(UserError, match="'algorithm.loss' is gspo, which treats a response as one action"):
        in_environment(advantage="reinforce_pp", loss="gspo").advantages([stepped(0, [1.0, 2.0])])
    in_environment(advantage="grpo", loss="gspo").advantages([stepped(0, [1.0, 2.0])] * 2)


def test_tokens_of_tools_count_for_nothing_but_the_length_of_the_response():
    """A response of 9 tokens, 5 of them a tool's, is trained like one of 4, and is as overlong as one of 9."""
    options = {"aggregation": "sequence_mean", "advantage": "reinforce_pp", "overlong_buffer": 0.5}
    plain = [sample(1.0, 4), sample(0.0, 3)]
    long = sample(1.0, 9)
    chosen = np.array([1, 1, 0, 0, 0, 1, 0, 0, 1], bool)
    with_tools = [
        with_completion(long, logprobs=plain[0].completion.logprobs, is_generated=chosen, num_turns=3),
        plain[1],
    ]
    penalised = objective(**options)
    np.testing.assert_allclose(penalised.rewards(with_tools), [1.0 - 4 / 5, 0.0])
    assert penalised.rewards(plain).tolist() == [1.0, 0.0]
    unpenalised = objective({"weight": "token"}, **options | {"overlong_buffer": 0.0})
    for got, expected in zip(unpenalised.advantages(with_tools), unpenalised.advantages(plain), strict=True):
        np.testing.assert_array_equal(got, expected)
    first, second = zip(unpenalised.sequences(with_tools), unpenalised.sequences(plain))
    for (got,), (expected,) in (first, second):
        assert got.values.keys() == expected.values.keys() == {"weights", "rollout_logprobs"}
        for name, values in expected.values.items():
            np.testing.assert_array_equal(got.values[name], values)
    (one,) = first[0]
    assert one.is_generated is chosen and one.num_generated == 4 and one.num_tokens == 10
