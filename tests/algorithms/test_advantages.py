"""Every advantage estimator against float64 references written from the papers, one group or token at a time."""

import dataclasses
import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.algorithms import advantages
from mindrlhf.algorithms.advantages import RewardBatch
from mindrlhf.algorithms.advantages.pass_at_k import group_advantages
from mindrlhf.errors import UserError


def draw_steps(stream, lengths):
    for length in lengths:
        ends = np.flatnonzero(stream.integers(0, 2, length))
        yield ends, stream.standard_normal(len(ends))


def draw(seed: int, *, penalised=False, sizes=(4, 3, 1, 5), discrete=False, stepped=False) -> RewardBatch:
    """Return ragged groups, their samples mixed, with everything that any estimator takes."""
    stream = np.random.default_rng(seed)
    group_ids = stream.permutation(np.repeat(np.arange(len(sizes)) * 7 + 2, sizes))
    count = len(group_ids)
    lengths = stream.integers(1, 8, count)
    return RewardBatch(
        rewards=stream.integers(0, 2, count).astype(float) if discrete else stream.standard_normal(count),
        group_ids=group_ids,
        lengths=lengths,
        penalties=[0.1 * stream.standard_normal(length) for length in lengths] if penalised else None,
        baselines=stream.standard_normal(count),
        values=[stream.standard_normal(length) for length in lengths],
        # One that applies to every prompt, and one that does not to the second group's.
        parts=[
            (1.0, stream.integers(0, 2, count).astype(float)),
            (-0.5, np.where(group_ids == 9, np.nan, stream.standard_normal(count))),
        ],
        steps=list(draw_steps(stream, lengths)) if stepped else None,
    )


def non_negative(batch):
    """The batch with rewards and without penalties that make one negative."""
    return dataclasses.replace(batch, rewards=np.abs(batch.rewards), penalties=None)


def totals(batch):
    penalties = batch.penalties or [np.zeros(1)] * len(batch.rewards)
    return [reward - math.fsum(penalty) for reward, penalty in zip(batch.rewards, penalties)]


def siblings(batch, index):
    return [other for other, group in enumerate(batch.group_ids) if group == batch.group_ids[index]]


def grpo(batch, is_scaled=True):
    rewards, result = totals(batch), []
    for index, reward in enumerate(rewards):
        group = [rewards[other] for other in siblings(batch, index)]
        std = statistics.stdev(group) if len(group) > 1 else 0.0
        advantage = 0.0
        if std > 1e-8:
            advantage = (reward - statistics.fmean(group)) / (std + 1e-6 if is_scaled else 1.0)
        result.append([advantage] * batch.lengths[index])
    return result


def dr_grpo(batch):
    return grpo(batch, is_scaled=False)


def rloo(batch):
    rewards, result = totals(batch), []
    for index, reward in enumerate(rewards):
        others = [rewards[other] for other in siblings(batch, index) if other != index]
        result.append([reward - statistics.fmean(others) if others else 0.0] * batch.lengths[index])
    return result


def to_go(batch):
    return [[math.fsum(part[start:]) for start in range(len(part))] for part in token_rewards(batch)]


def whiten(nested):
    tokens = [value for part in nested for value in part]
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    return [[(value - mean) / std for value in part] for part in nested]


def reinforce_pp(batch):
    return whiten(to_go(batch))


def reinforce_pp_baseline(batch):
    return whiten(dr_grpo(batch))


def remax(batch):
    return [[value - baseline for value in part] for part, baseline in zip(to_go(batch), batch.baselines)]


def gae(batch, gamma=0.9, gae_lambda=0.8, whiten_advantages=True):
    """Eq. 16 of arXiv:1506.02438 as the double sum that it is."""
    result = []
    for index, values in enumerate(batch.values):
        length = batch.lengths[index]
        rewards = token_rewards(batch)[index]
        following = [*values[1:], 0.0]
        deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
        result.append(
            [sum((gamma * gae_lambda) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]
        )
    return whiten(result) if whiten_advantages else result


def pass_at_k(batch, pass_k=2):
    """Every subset of k samples of a group, one by one."""
    rewards, result = totals(batch), []
    for index in range(len(rewards)):
        group = siblings(batch, index)
        subsets = list(itertools.combinations(group, pass_k))
        best = [max(rewards[item] for item in subset) for subset in subsets]
        advantage = 0.0
        if len(group) > pass_k and statistics.pstdev(best) > 1e-8:
            own = [value for value, subset in zip(best, subsets) if index in subset]
            advantage = (statistics.fmean(own) - statistics.fmean(best)) / statistics.pstdev(best)
        result.append([advantage] * batch.lengths[index])
    return result


def distill(batch, distill_reward_weight=0.0):
    result = []
    for index, reward in enumerate(batch.rewards):
        mean = statistics.fmean(batch.rewards[other] for other in siblings(batch, index))
        penalty = batch.penalties[index] if batch.penalties else np.zeros(batch.lengths[index])
        result.append([distill_reward_weight * (reward - mean) - value for value in penalty])
    return result


def lite_ppo(batch):
    std = statistics.stdev(totals(batch))
    return [[value / (std + 1e-6) for value in part] for part in dr_grpo(batch)]


def maxrl(batch):
    rewards, result = totals(batch), []
    for index, reward in enumerate(rewards):
        group = [rewards[other] for other in siblings(batch, index)]
        mean = statistics.fmean(group)
        is_flat = mean < 1e-8 or max(group) - min(group) < 1e-8
        result.append([0.0 if is_flat else reward / mean - 1] * batch.lengths[index])
    return result


def gdpo(batch):
    """Each part by GRPO's own formula, weighted, over the standard deviation of the sums."""
    sums = [0.0] * len(batch.rewards)
    for weight, values in batch.parts:
        for index, value in enumerate(values):
            group = [values[other] for other in siblings(batch, index)]
            if not any(map(math.isnan, group)) and len(group) > 1 and statistics.stdev(group) > 1e-8:
                sums[index] += weight * (value - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
    mean, std = statistics.fmean(sums), statistics.stdev(sums)
    return [[(value - mean) / (std + 1e-6)] * length for value, length in zip(sums, batch.lengths)]


def token_rewards(batch):
    """Penalties, rewards of steps where they end, and what is left at the last token."""
    result = []
    for index, length in enumerate(batch.lengths):
        rewards = [-value for value in batch.penalties[index]] if batch.penalties else [0.0] * length
        ends, given = batch.steps[index] if batch.steps else ((), ())
        rewards[-1] += batch.rewards[index] - math.fsum(given)
        for end, value in zip(ends, given):
            rewards[end] += value
        result.append(rewards)
    return result


def turn_grpo(batch):
    """R as the paper lists it: the rewards of the steps of all responses of a group, a step being tokens in a row."""
    steps = []
    for index, rewards in enumerate(token_rewards(batch)):
        ends = sorted({*(batch.steps[index][0] if batch.steps else ()), batch.lengths[index] - 1})
        starts = [0, *(end + 1 for end in ends[:-1])]
        steps.append([(end, math.fsum(rewards[start : end + 1])) for start, end in zip(starts, ends)])
    result = []
    for index in range(len(batch.rewards)):
        every = [reward for other in siblings(batch, index) for _, reward in steps[other]]
        std = statistics.stdev(every) if len(every) > 1 else 0.0
        scale = 0.0 if std <= 1e-8 else 1 / (std + 1e-6)
        mean = statistics.fmean(every)
        result.append(
            [
                math.fsum((reward - mean) * scale for end, reward in steps[index] if end >= token)
                for token in range(batch.lengths[index])
            ]
        )
    return result


OPTIONS = {
    "distill": [{"distill_reward_weight": 0.0}, {"distill_reward_weight": 0.5}],
    "gae": [
        {"gamma": 0.9, "gae_lambda": 0.8, "whiten_advantages": True},
        {"gamma": 1.0, "gae_lambda": 0.95, "whiten_advantages": False},
    ],
    "pass_at_k": [{"pass_k": 1}, {"pass_k": 2}, {"pass_k": 3}],
}
CASES = [(name, options) for name in advantages.names() for options in OPTIONS.get(name, [{}])]


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), penalised=st.booleans(), discrete=st.booleans(), stepped=st.booleans())
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_equals_the_paper(name, options, seed, penalised, discrete, stepped):
    batch = draw(seed, penalised=penalised, discrete=discrete, stepped=stepped)
    batch = non_negative(batch) if name == "maxrl" else batch
    actual = advantages.find(name).estimate(batch, **options)
    expected = globals()[name](batch, **options)
    assert [part.dtype for part in actual] == [np.float64] * len(batch.rewards)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", advantages.names())
def test_modules_state_what_they_take(name):
    module = advantages.find(name)
    batch = non_negative(draw(0))
    options = {key: value for case, values in CASES if case == name for key, value in values.items()}
    assert set(module.OPTIONS) == set(options)
    assert set(module.NEEDS) <= {"group", "baselines", "values", "parts", "teacher"}
    assert module.PER_TOKEN in ("always", "penalised", "never")
    batch = dataclasses.replace(batch, steps=draw(0, stepped=True).steps) if name == "turn_grpo" else batch
    varies = any(np.ptp(part) > 1e-9 for part in module.estimate(batch, **options))
    assert varies == (module.PER_TOKEN == "always")
    if name != "maxrl":  # which refuses penalties
        batch = draw(0, penalised=True, stepped=name == "turn_grpo")
        varies = any(np.ptp(part) > 1e-9 for part in module.estimate(batch, **options))
        assert varies == (module.PER_TOKEN != "never")


def batch_of(*groups, length=3):
    rewards = np.concatenate(groups).astype(float)
    ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return RewardBatch(rewards, ids, np.full(len(rewards), length), parts=[(1.0, rewards)])


def firsts(parts):
    return [part[0] for part in parts]


def test_pass_at_k_is_the_closed_form_of_the_paper_for_right_and_wrong():
    """The analytical derivation of arXiv:2508.10751: with R = 1 - C(wrong, k) / C(n, k) and s = sqrt(R (1 - R))."""
    for size, right, k in itertools.product((4, 8), (1, 2, 3), (2, 3)):
        rewards = np.array([1.0] * right + [0.0] * (size - right))
        wrong = size - right
        mean = 1 - math.comb(wrong, k) / math.comb(size, k)
        if mean == 1:
            continue
        std = math.sqrt(mean * (1 - mean))
        negative = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / std
        expected = [(1 - mean) / std] * right + [negative] * wrong
        np.testing.assert_allclose(group_advantages(rewards, k), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in advantages.names() if "group" in advantages.find(name).NEEDS])
@pytest.mark.parametrize("value", [0.0, 0.3, -5.0, 1e6])
def test_groups_without_signal_give_exactly_zero(name, value):
    """All equal, up to rounding, and of one sample; beside a group that has a signal."""
    value = abs(value) if name == "maxrl" else value
    options = {"pass_k": 2} if name == "pass_at_k" else {}
    estimate = advantages.find(name).estimate
    plain = batch_of([value] * 4, [value], [value, value + 1e-16])
    assert all((part == 0.0).all() for part in estimate(plain, **options))
    beside = firsts(estimate(batch_of([value] * 4, [0.0, 1.0, 0.0, 0.0], [0.1 + 0.2, 0.3, 0.3]), **options))
    assert np.isfinite(beside).all() and beside[5] > 0
    if name != "reinforce_pp_baseline":  # which shifts everything by the mean over tokens, 0 but for rounding
        assert (np.array(beside[:4] + beside[8:]) == 0.0).all()
    np.testing.assert_allclose(beside[:4] + beside[8:], 0.0, atol=1e-12)


def test_maxrl_refuses_what_is_no_success():
    with pytest.raises(UserError, match="'algorithm.advantage' is maxrl.*a sample earned -0.5"):
        advantages.find("maxrl").estimate(batch_of([1.0, -0.5]))


@settings(max_examples=50)
@given(seed=st.integers(0, 1000))
def test_steps_move_rewards_and_make_none(seed):
    batch = draw(seed, penalised=True, stepped=True)
    plain = dataclasses.replace(batch, steps=None)
    np.testing.assert_allclose([part.sum() for part in batch.token_rewards()], plain.totals(), atol=1e-12)
    np.testing.assert_allclose(batch.totals(), plain.totals())


@pytest.mark.parametrize(
    "step", [([0, 0], [1.0, 1.0]), ([2], [1.0]), ([-1], [1.0]), ([0], [np.nan]), ([0, 1], [1.0])]
)
def test_steps_that_are_none_are_an_error(step):
    with pytest.raises(ValueError, match="steps of sample 0 must be ascending places in it, and finite rewards"):
        RewardBatch(np.ones(1), np.zeros(1, int), np.array([2]), steps=[tuple(map(np.array, step))])


def test_the_input_is_left_alone():
    rewards = np.array([1.0, 0.0, 3.0, 5.0])
    for name in ("grpo", "rloo", "reinforce_pp", "pass_at_k"):
        options = {"pass_k": 1} if name == "pass_at_k" else {}
        advantages.find(name).estimate(RewardBatch(rewards, np.array([0, 0, 1, 1]), np.ones(4, int)), **options)
    np.testing.assert_array_equal(rewards, [1, 0, 3, 5])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["rewards", "baselines", "penalties", "values"])
def test_a_number_that_is_not_finite_is_an_error(field, value):
    parts = {
        "rewards": np.zeros(2),
        "baselines": np.zeros(2),
        "penalties": [np.zeros(2)] * 2,
        "values": [np.zeros(2)] * 2,
    }
    broken = [part.copy() for part in parts[field]] if isinstance(parts[field], list) else parts[field].copy()
    if isinstance(broken, list):
        broken[1][0] = value
    else:
        broken[1] = value
    with pytest.raises(ValueError, match=f"{field}.*finite"):
        RewardBatch(**{**parts, field: broken}, group_ids=np.zeros(2, int), lengths=np.array([2, 2]))


def test_parts_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="group_ids has 3 entries for 2 rewards"):
        RewardBatch(np.zeros(2), np.zeros(3, int), np.ones(2, int))
    with pytest.raises(ValueError, match="values of sample 1 must be 3 finite numbers"):
        RewardBatch(np.zeros(2), np.zeros(2, int), np.array([2, 3]), values=[np.zeros(2), np.zeros(2)])


@pytest.mark.parametrize("length", [0, -1])
def test_a_response_without_tokens_is_refused_before_any_estimator_sees_it(length):
    with pytest.raises(ValueError, match=f"sample 1 has {length} response tokens"):
        RewardBatch(np.ones(2), np.zeros(2, int), np.array([3, length]))
