"""A reward model's part of the reward: on rank 0 by hand, and through a real scorer's cells."""

import contextlib

import numpy as np
import pytest
from configs import grpo_config
from engines import whole_engine, whole_model
from fakes import LocalTeam
from made_samples import make_sample, with_completion
from tiny_models import tiny_model

from mindrlhf.config.reward import RewardSection
from mindrlhf.rollout.types import AgentRecord, OwnSequence
from mindrlhf.training.batch import RowOptions
from mindrlhf.training.loop.reward_model import RewardModel

MODEL = tiny_model(architectures=["Qwen2ForSequenceClassification"])


def sample(prompt, response, reward=0.0, is_generated=None):
    generated = len(response) if is_generated is None else sum(is_generated)
    return make_sample(
        prompt,
        response,
        reward,
        logprobs=np.zeros(generated),
        is_generated=None if is_generated is None else np.array(is_generated),
    )


class SumRank:
    """Scores a text by the sum of its tokens so far; token 63 makes it infinite."""

    def __init__(self):
        self.num_sequences = 0

    def score_responses(self, batch):
        results = []
        for rows in batch.micro_batches:
            scores = np.zeros_like(rows.mask)
            for row, segments in enumerate(rows.segment_ids):
                for segment in range(1, segments.max() + 1):
                    self.num_sequences += 1
                    places = np.flatnonzero(segments == segment)
                    ids = rows.input_ids[row, places].astype(np.float64)
                    # At a position, the text that ends with the token it predicts.
                    scores[row, places[:-1]] = np.where(ids == 63, np.inf, ids).cumsum()[1:]
            results.append(scores * np.where(rows.mask > 0, 1, 0))
        return results


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("pack", [True, False])
def test_the_score_of_the_last_token_is_a_part_of_its_own(world_size, pack):
    team = LocalTeam([SumRank() for _ in range(world_size)])
    held = []

    @contextlib.contextmanager
    def uninterruptible():
        held.append(1)
        yield

    reward = RewardSection(model_path="m", model_weight=0.5)
    model = RewardModel(team, RowOptions((16,), 2, world_size, pack), reward, uninterruptible)
    before = [sample([1, 2], [3, 4, 5], 1.0), sample([7], [1]), sample([1, 2], [3, 4], -1.0), sample([2], [9, 9])]
    after = model.add_rewards(before)
    assert [item.reward.parts for item in after] == [
        {"length": 1.0, "reward_model": 15.0},
        {"length": 0.0, "reward_model": 8.0},
        {"length": -1.0, "reward_model": 10.0},
        {"length": 0.0, "reward_model": 20.0},
    ]
    assert [item.reward.total for item in after] == [8.5, 4.0, 4.0, 10.0]
    assert not any(item.reward.failures for item in after) and held == [1]
    assert before[0].reward.parts == {"length": 1.0}, "the samples given are not changed"


def test_equal_responses_are_scored_once():
    team = LocalTeam([SumRank()])
    model = RewardModel(team, RowOptions((16,), 2, 1, True), RewardSection(model_path="m"))
    after = model.add_rewards([sample([1], [2, 3]), sample([1], [2, 3]), sample([1, 2], [3]), sample([1], [2, 3])])
    assert [item.reward.parts["reward_model"] for item in after] == [6.0] * 4
    assert team.rank_0.num_sequences == 2


def test_a_score_that_is_no_number_is_replaced_and_noted():
    reward = RewardSection(model_path="m", model_weight=2.0, failure_value=-3.0)
    model = RewardModel(LocalTeam([SumRank()]), RowOptions((16,), 2, 1, True), reward)
    bad, good = model.add_rewards([sample([1], [63], 1.0), sample([1], [2], 1.0)])
    assert bad.reward.parts["reward_model"] == -3.0 and bad.reward.total == -5.0
    assert bad.reward.failures == {"reward_model": "returned inf, not a finite number"}
    assert good.reward.total == 7.0 and not good.reward.failures


def test_with_tools_the_last_token_of_the_model_counts():
    model = RewardModel(LocalTeam([SumRank()]), RowOptions((16,), 2, 1, True), RewardSection(model_path="m"))
    (after,) = model.add_rewards([sample([1], [2, 3, 4], is_generated=[True, False, True])])
    assert after.reward.parts["reward_model"] == 10.0


def test_of_an_agent_the_sequence_of_the_first_call_counts():
    model = RewardModel(LocalTeam([SumRank()]), RowOptions((16,), 2, 1, True), RewardSection(model_path="m"))
    contexts = ((7, [2, 3, 4], [True, False, True]), (30, [8, 9], [True, True]))
    sequences = tuple(
        OwnSequence(np.int32([prompt]), np.int32(ids), np.array(generated)) for prompt, ids, generated in contexts
    )
    one = sample([1], [2, 3, 4, 8, 9], is_generated=[True, False, True, True, True])
    (after,) = model.add_rewards([with_completion(one, agent=AgentRecord(sequences, "left"))])
    assert after.reward.parts["reward_model"] == 7 + 2 + 3 + 4


def test_an_agent_that_has_asked_nothing_costs_its_own_sample_only():
    reward = RewardSection(model_path="m", model_weight=2.0, failure_value=-3.0)
    model = RewardModel(LocalTeam([SumRank()]), RowOptions((16,), 2, 1, True), reward)
    silent = with_completion(sample([1], []), agent=AgentRecord((), "", "it died"))
    for others in ([sample([1], [2])], []):
        after, *rest = model.add_rewards([silent, *others])
        assert after.reward.parts["reward_model"] == -3.0 and after.reward.total == -6.0
        assert after.reward.failures == {"reward_model": "had nothing to read"}
        assert [one.reward.total for one in rest] == [6.0] * len(others)


def test_a_warm_up_runs_every_row_length():
    seen = []

    class Recorder(LocalTeam):
        def call(self, method, per_rank):
            seen.extend(rows.mask.shape for own in per_rank for rows in own["batch"].micro_batches)
            return super().call(method, per_rank)

    RewardModel(Recorder([SumRank()]), RowOptions((8, 32), 4, 1, True), RewardSection(model_path="m")).warm_up()
    assert seen == [(4, 8), (4, 32)]


def test_a_scorer_on_a_rank_gives_what_its_weights_say(mindformers, tmp_path):
    """The score is the score weight times the final hidden state, by the cells that training uses."""
    import mindspore as ms
    from networks import load_model

    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.training.engine.actor import Actor
    from mindrlhf.training.engine.build import build_policy_loss
    from mindrlhf.training.team import Team as RealTeam
    from mindrlhf.weights.convert import export_hf, random_hf_weights

    ms.set_context(runtime_num_threads=1)
    language_model = {**MODEL, "architectures": ["Qwen2ForCausalLM"]}
    export_hf(random_hf_weights(language_model, 1), language_model, tmp_path / "policy")
    export_hf(random_hf_weights(MODEL, 2), MODEL, tmp_path / "scorer")
    reward = {"model_path": str(tmp_path / "scorer"), "model_weight": 2.0}
    config = grpo_config(model={"path": str(tmp_path / "policy")}, reward=reward)
    network = load_model(config.model, config.model.path, config.run, 32)
    loss = build_policy_loss(config, PolicyLogProbs(network, 1.0, "cpu"))
    scorer = load_model(config.model, config.reward.model_path, config.run, 32, as_scorer=True)
    reward_model = whole_model(TokenScores(scorer, after_token=True))
    actor = Actor(whole_engine(loss, config.optimizer), reward_model=reward_model)
    model = RewardModel(RealTeam(actor), RowOptions((32,), 2, 1, True), config.reward)
    generator = np.random.default_rng(0)
    before = [
        sample(generator.integers(0, 64, 3), generator.integers(0, 64, length), 1.0) for length in (1, 5, 9, 12, 2)
    ]
    after = model.add_rewards(before)
    weight = scorer.score_weight.asnumpy().astype(np.float64).ravel()
    for given, scored in zip(before, after, strict=True):
        # Alone in a row of its own.
        tokens = np.concatenate([given.prompt.prompt_ids, given.completion.token_ids])
        ids, segments = np.zeros((1, 32), np.int32), np.zeros((1, 32), np.int32)
        ids[0, : len(tokens)], segments[0, : len(tokens)] = tokens, 1
        hidden = scorer(ms.Tensor(ids), ms.Tensor(segments)).asnumpy().reshape(32, -1)
        score = hidden[len(tokens) - 1].astype(np.float64) @ weight
        assert scored.reward.parts["reward_model"] == pytest.approx(score, abs=1e-4)
        assert scored.reward.total == pytest.approx(1.0 + 2.0 * score, abs=2e-4)
    assert np.ptp([item.reward.total for item in after]) > 0.01
