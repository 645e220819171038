"""An agent's sample has several sequences: what goes into rows and comes back, and that they share one advantage."""

import dataclasses
import json

import numpy as np
import pytest
from configs import grpo_config
from made_samples import make_sample, with_completion
from saved_progress import stored

from mindrlhf.config.reward import RewardSection, ToolSection
from mindrlhf.errors import UserError
from mindrlhf.observe import report
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.observe.viewer import page
from mindrlhf.rollout.samples import Sampler, groups_that_teach, sample_record
from mindrlhf.rollout.types import AgentRecord, OwnSequence
from mindrlhf.training.batch import RowOptions, make_update_batch
from mindrlhf.training.loop.objective import Objective
from mindrlhf.training.loop.report import sample_metrics
from mindrlhf.training.loop.step import StepSamples


def ids(*values):
    return np.array(values, np.int32)


def mask(*values):
    return np.array(values, bool)


# Two contexts: the first with a tool's answer (token 7) within, the second of a sub-agent.
SEQUENCES = (
    OwnSequence(ids(1, 2, 3), ids(4, 5, 7, 6), mask(1, 1, 0, 1)),
    OwnSequence(ids(8, 9), ids(10, 11), mask(1, 1)),
)


def plain(reward, *tokens, group=0):
    return make_sample(ids(1, 2, 3), ids(*tokens), reward, group=group, logprobs=-np.array(tokens, np.float32) / 16)


def of_agent(reward, num_turns=3):
    base = plain(reward, 4, 5, 7, 6, 10, 11)
    return with_completion(
        base,
        logprobs=-np.array([4, 5, 6, 10, 11], np.float32) / 16,
        is_generated=np.concatenate([one.is_generated for one in SEQUENCES]),
        num_turns=num_turns,
        agent=AgentRecord(SEQUENCES, "left"),
    )


def objective(**algorithm):
    return Objective(
        grpo_config(rollout={"max_response_length": 10}, algorithm=algorithm, correction={"weight": "token"})
    )


SAMPLES = [of_agent(1.0), plain(0.0, 12, 13), of_agent(0.0), plain(0.0, 14)]
OPTIONS = {
    "rows of one": RowOptions((16,), 1, 1, False),
    "packed, two ranks": RowOptions((16, 32), 2, 2, True),
    "prompts shared": RowOptions((32,), 2, 1, True, packing="shared_prompts"),
}


def test_all_sequences_of_an_episode_have_its_advantage_and_it_counts_once_in_its_group():
    advantages = objective().advantages(SAMPLES)
    # The rewards 1, 0, 0, 0: an episode of two sequences is one sample of four, not two of six.
    rewards = np.array([1.0, 0, 0, 0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert [len(one) for one in advantages] == [5, 2, 5, 1]
    for found, value in zip(advantages, expected):
        np.testing.assert_allclose(found, value)
    (first, second), *_ = objective().sequences(SAMPLES, advantages)
    np.testing.assert_array_equal(first.values["advantages"], advantages[0][:3])
    np.testing.assert_array_equal(second.values["advantages"], advantages[0][3:])
    np.testing.assert_array_equal(first.values["rollout_logprobs"], -np.float32([4, 5, 6]) / 16)
    np.testing.assert_array_equal(second.values["rollout_logprobs"], -np.float32([10, 11]) / 16)
    assert second.prompt_ids.tolist() == [8, 9] and second.response_ids.tolist() == [10, 11]


def test_a_mean_over_sequences_takes_an_episode_for_one():
    weights = [
        np.concatenate([one.values["weights"] for one in own])
        for own in objective(aggregation="sequence_mean").sequences(SAMPLES)
    ]
    # 10 generated tokens of all: each of 4 samples weighs 13 / 4, spread over its own tokens.
    total = 5 + 2 + 5 + 1
    for found, length in zip(weights, (5, 2, 5, 1)):
        np.testing.assert_allclose(found, total / (4 * length), rtol=1e-6)


def of_roles(white, black, failure=""):
    """An episode of two roles, and a verifier of the whole beside it."""
    sample = of_agent(2.0 * white + 0.25)
    roles = tuple(dataclasses.replace(one, role=role) for one, role in zip(SEQUENCES, ("white", "black")))
    rewards = {} if failure else {"white": white, "black": black}
    parts = {"environment_reward": white, "length": 0.25}
    return dataclasses.replace(
        with_completion(sample, agent=AgentRecord(roles, "left", failure, rewards=rewards)),
        reward=dataclasses.replace(sample.reward, parts=parts),
    )


def rewarding_roles(**algorithm):
    made = objective(**algorithm)
    reward = RewardSection(verifier_function=("environment_reward", "length"), verifier_weight=(2.0, 1.0))
    made._config = dataclasses.replace(made._config, reward=reward, tools=ToolSection(agent="agents/play.py:play"))
    return made


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_a_role_is_compared_with_the_same_role_of_the_other_episodes(advantage):
    whites, blacks = [1.0, 0.0, 1.0], [-1.0, 0.5, -0.25]
    found = rewarding_roles(advantage=advantage).advantages([of_roles(*pair) for pair in zip(whites, blacks)])
    for rewards, where in ((whites, slice(0, 3)), (blacks, slice(3, 5))):
        totals = 2 * np.array(rewards) + 0.25
        if advantage == "grpo":
            expected = (totals - totals.mean()) / (totals.std(ddof=1) + 1e-6)
        else:
            expected = [total - np.delete(totals, i).mean() for i, total in enumerate(totals)]
        for part, value in zip(found, expected):
            np.testing.assert_allclose(part[where], value)


def test_an_episode_of_roles_that_failed_has_its_reward_for_each():
    failed = dataclasses.replace(of_roles(0.0, 0.0, "it died"), reward=dataclasses.replace(plain(-3.0, 9).reward))
    found = rewarding_roles().advantages([of_roles(1.0, 0.5), failed])
    for where in (slice(0, 3), slice(3, 5)):  # of two that differ: one deviation above and below the mean
        np.testing.assert_allclose(found[0][where], 1 / np.sqrt(2), rtol=1e-5)
        np.testing.assert_allclose(found[1][where], -1 / np.sqrt(2), rtol=1e-5)


def test_penalties_are_of_the_tokens_of_a_role():
    penalties = [np.arange(5) / 8, np.zeros(5)]
    found = rewarding_roles(advantage="rloo").advantages([of_roles(1.0, 0.0), of_roles(0.0, 0.0)], penalties=penalties)
    whites = np.array([2.25 - (0 + 1 + 2) / 8, 0.25])
    blacks = np.array([0.25 - (3 + 4) / 8, 0.25])
    np.testing.assert_allclose(found[0], [whites[0] - whites[1]] * 3 + [blacks[0] - blacks[1]] * 2)
    np.testing.assert_allclose(found[1], [whites[1] - whites[0]] * 3 + [blacks[1] - blacks[0]] * 2)


def test_greedy_episodes_have_no_rewards_of_roles():
    with pytest.raises(UserError, match="remax"):
        rewarding_roles(advantage="remax").advantages([of_roles(1.0, 0.0)], baselines=np.array([0.5]))


def test_nothing_trains_on_an_agent_that_has_asked_nothing():
    silent = of_agent(0.0, num_turns=0)
    found = objective().sequences([SAMPLES[1], silent])
    assert all((one.values["weights"] == 0).all() for one in found[1]) and (found[0][0].values["weights"] > 0).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_what_ranks_compute_of_several_sequences_comes_back_by_sample_and_goes_out_again(options):
    chosen = OPTIONS[options]
    computed = np.array([True, True, False, True])
    batch = make_update_batch(objective().sequences(SAMPLES), computed, chosen)
    assert batch.counts == (2, 1, 1) and batch.num_samples == 3 and batch.num_tokens == 13
    assert batch.num_computed == 8
    # A rank that "computes" the label of each position gives every sample its own generated tokens.
    labels = [rows.labels.astype(np.float32) for rows in batch.micro_batches]
    found = batch.responses(labels)
    assert [one.tolist() for one in found] == [[4, 5, 6, 10, 11], [12, 13], [14]]
    spread = batch.spread([one * 2.0 for one in found], chosen.num_ranks)
    for rank, parts in enumerate(spread):
        for number, array in zip(batch.numbers(rank, chosen.num_ranks), parts):
            rows = batch.micro_batches[number]
            np.testing.assert_array_equal(array, 2 * rows.labels * rows.mask)


def test_samples_of_one_sequence_are_as_they_were():
    batch = make_update_batch(
        objective().sequences([SAMPLES[1], SAMPLES[3]]), np.array([True, True]), OPTIONS["rows of one"]
    )
    assert batch.counts == () and batch.num_samples == len(batch.placed) == 2
    with pytest.raises(AssertionError):
        batch.spread([np.zeros(2)], 1)
    with pytest.raises(AssertionError):
        batch.spread([np.zeros(2), np.zeros(2)], 1)


def values_of(record):
    """Return all that a sample holds, arrays with their dtypes."""
    if dataclasses.is_dataclass(record):
        return {field.name: values_of(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, np.ndarray):
        return record.dtype.str, record.shape, record.tolist()
    return tuple(map(values_of, record)) if isinstance(record, tuple) else record


def test_episodes_that_are_carried_over_come_back_from_a_checkpoint_as_they_were(tmp_path):
    silent = with_completion(plain(0.0, 9), agent=AgentRecord((), "", failure="it died"))
    samples = [of_agent(1.0), plain(0.0, 12, 13), silent, of_agent(0.5, num_turns=7), of_roles(1.0, -1.0)]
    found = stored(samples, tmp_path / "step")
    assert [values_of(one) for one in found] == [values_of(one) for one in samples]
    assert found[0].completion.agent.sequences[1].prompt_ids.tolist() == [8, 9]


@pytest.mark.parametrize(
    ("whites", "blacks", "teaches"),
    [((1.0, 1.0), (0.5, 0.5), False), ((1.0, 0.0), (0.5, 0.5), True), ((1.0, 1.0), (0.5, 0.0), True)],
    ids=["all the same", "the first role's differ", "the other role's differ"],
)
def test_a_group_has_a_signal_when_any_role_has(whites, blacks, teaches):
    """Seen from the advantages: a group without one has none but zeros."""
    samples = [of_roles(*both) for both in zip(whites, blacks)]
    advantages = np.concatenate(rewarding_roles().advantages(samples))
    assert (np.abs(advantages) > 0).any() == teaches
    other = [dataclasses.replace(plain(0.0, 4, group=1), group=1), dataclasses.replace(plain(1.0, 4), group=1)]
    assert [one.tolist() for one in groups_that_teach([*other, *samples])] == [[0, 1], [teaches, True]]
    assert sample_metrics(samples)["reward/groups_without_signal"] == 1.0 - teaches
    assert StepSamples(samples, samples).scored().used == samples


def test_the_samples_file_report_and_viewer_hold_every_conversation_by_its_role(tmp_path):
    class Tokens:
        def decode(self, tokens, skip_special_tokens=True):
            return "".join(f"<{one}>" for one in tokens)

    sample = of_roles(1.0, -0.5)
    conversations = Sampler(None, None, Tokens()).conversations(sample)
    assert conversations == [
        {"role": "white", "prompt": "<1><2><3>", "completion": "<4><5><7><6>", "reward": 1.0},
        {"role": "black", "prompt": "<8><9>", "completion": "<10><11>", "reward": -0.5},
    ]
    writer = SampleWriter(tmp_path / "samples.jsonl", first_step=1)
    writer.write([dataclasses.replace(sample_record(one, 1), conversations=Sampler(None, None, Tokens()).conversations(
        one)) for one in (sample, plain(1.0, 4))])  # fmt: skip
    writer.close()
    line, other = (json.loads(text) for text in (tmp_path / "samples.jsonl").read_text().splitlines())
    assert line["conversations"] == conversations and "conversations" not in other
    turns = [
        ("white, reward 1", "<1><2><3>"), ("assistant", "<4><5><7><6>"),
        ("black, reward -0.5", "<8><9>"), ("assistant", "<10><11>"),
    ]  # fmt: skip
    assert report._sample(line)["turns"] == turns
    row = page._sample_row(line, {}, {})
    assert row[2] == "\n\n".join(f"{role}:\n{text}" for role, text in turns)
