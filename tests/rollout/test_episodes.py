"""Episodes over a scripted generator and a real environment in its own process, token by token."""

import math

import numpy as np
import pytest
from made_samples import make_sample, with_prompt
from test_conversations import END, TOKENIZER, Script

from mindrlhf.data.mindrecord import Prompt
from mindrlhf.errors import UserError
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rollout.conversations import ConversationLimits, Episodes
from mindrlhf.rollout.samples import Sampler, tool_metrics
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.tools.environments import check_columns, check_environment
from mindrlhf.tools.episodes import EpisodePool

pytestmark = pytest.mark.timeout(120)

# Guess a number: each guess earns -1, the right one 10.
ENVIRONMENT = """
import os, time
class Guess:
    def reset(self, answer):
        if answer == "bad": raise KeyError("no such task")
        self.number, self.count = int(answer), 0
    def step(self, action):
        if action == "die": os._exit(3)
        if action == "hang": time.sleep(100)
        if action == "raise": raise RuntimeError("broken")
        if action == "nan": return "x", float("nan"), False
        if action == "long": return "y" * 50000, 0, False
        self.count += 1
        guess = int(action)
        if guess == self.number: return "right", 10, True
        return ("more" if guess < self.number else "less") + f" {self.count}", -1.0, False
"""


@pytest.fixture
def environment(tmp_path):
    path = tmp_path / "guess.py"
    path.write_text(ENVIRONMENT)
    return f"{path}:Guess"


@pytest.fixture
def pool(environment):
    with EpisodePool(environment, 2, 5.0, 1024) as opened:
        yield opened


def run(pool, scripts, answers, num_samples=1, limit=100, max_turns=4, max_observation=30):
    """Play; return completions by prompt and sample, and the generator with what it was asked."""
    generator = Script(scripts)
    episodes = Episodes(generator, pool, TOKENIZER, ConversationLimits(max_turns, 99, max_observation))
    requests = [
        GenerationRequest(number, tuple(TOKENIZER.encode(text)), num_samples, seed=number, answer=answer)
        for number, (text, answer) in enumerate(answers)
    ]
    sampling = SamplingParams(limit, stop_token_ids=(END,))
    found = {(one.request_id, one.sample_index): one for one in episodes.generate(requests, sampling)}
    return found, generator


def test_an_episode_by_hand(pool):
    found, generator = run(pool, {"a": [["5", "7", "6"], ["6"]]}, [("a?", "6")], num_samples=2)
    won, lucky = found[0, 0], found[0, 1]
    assert TOKENIZER.decode(won.token_ids, skip_special_tokens=False) == "5$\nmore 1\n7$\nless 2\n6$"
    assert won.is_generated.tolist() == [True] * 2 + [False] * 8 + [True] * 2 + [False] * 8 + [True] * 2
    assert (won.episode_return, won.num_turns, won.finish_reason) == (8.0, 3, "stop")
    assert (lucky.episode_return, lucky.num_turns, lucky.num_tool_calls) == (10.0, 1, 1)
    assert len(won.logprobs) == 6
    assert won.turn_rewards == ((2, -1.0), (2, -1.0), (2, 10.0)) and won.turn_lengths == [2, 2, 2]
    assert lucky.turn_rewards == ((2, 10.0),)


def test_tokens_go_in_as_they_came_out(pool):
    _, generator = run(pool, {"a": ["5", "7", "6"]}, [("a?", "6")])
    first, second, third = (batch[0].prompt_ids for batch in generator.batches)
    assert second[: len(first)] == first and third[: len(second)] == second
    assert second[len(first) :] == (ord("5"), END, *TOKENIZER.encode("\nmore 1\n"))


def test_episodes_of_a_batch_do_not_mix(pool):
    answers = [(f"{letter}?", str(number)) for number, letter in enumerate("abcdefgh")]
    scripts = {letter: [["0", "1", "2", "3"][: number + 1] for _ in range(3)] for number, letter in enumerate("abcd")}
    scripts |= {
        letter: [["9", str(number)] for _ in range(3)] for number, letter in enumerate("abcdefgh") if number > 3
    }
    found, _ = run(pool, scripts, answers, num_samples=3)
    returns = [[found[number, index].episode_return for index in range(3)] for number in range(8)]
    assert returns == [[10.0 - number] * 3 for number in range(4)] + [[9.0] * 3] * 4


def test_limits_end_an_episode_with_what_it_has_earned(pool):
    found, _ = run(pool, {"a": ["1", "2", "3", "4"]}, [("a?", "6")], max_turns=3)
    assert (found[0, 0].finish_reason, found[0, 0].episode_return, found[0, 0].num_turns) == ("length", -3.0, 3)
    found, _ = run(pool, {"a": ["1", "2222222"]}, [("a?", "6")], limit=14)
    assert (found[0, 0].finish_reason, found[0, 0].episode_return) == ("length", -1.0), "half an action is none"
    assert found[0, 0].turn_rewards == ((2, -1.0), (len(found[0, 0].logprobs) - 2, 0.0))
    found, _ = run(pool, {"a": ["1", "2"]}, [("a?", "6")], limit=8)
    assert (found[0, 0].finish_reason, len(found[0, 0].token_ids)) == ("length", 2), "no room for what it would see"


def test_long_observations_are_cut(pool):
    found, _ = run(pool, {"a": ["long", "6"]}, [("a?", "6")], max_observation=5)
    assert "\nyyyyy [cut]\n" in TOKENIZER.decode(found[0, 0].token_ids)
    assert found[0, 0].episode_return == 10.0


@pytest.mark.parametrize("action", ["die", "raise", "nan", "what", "hang"])
def test_an_environment_that_breaks_down_ends_its_episode_only(environment, action, capfd):
    with EpisodePool(environment, 1, 2.0, 1024) as pool:
        found, _ = run(pool, {"a": [action]}, [("a?", "6")])
        assert math.isnan(found[0, 0].episode_return) and found[0, 0].num_tool_failures == 1
        assert found[0, 0].turn_rewards == ()
        assert "an episode has ended early" in capfd.readouterr().err
        found, _ = run(pool, {"b": ["6"]}, [("b?", "6")])
        assert found[0, 0].episode_return == 10.0


def test_an_episode_that_does_not_begin_says_why(pool, capfd):
    found, _ = run(pool, {"a": ["6"]}, [("a?", "bad")])
    assert math.isnan(found[0, 0].episode_return)
    assert "KeyError: 'no such task'" in capfd.readouterr().err


def test_the_return_is_a_reward_like_any_other(pool):
    generator = Script({"a": [["5", "6"], ["6"]], "b": [["raise"], ["3"]]})
    episodes = Episodes(generator, pool, TOKENIZER, ConversationLimits(4, 99, 30))
    records = [
        Prompt(np.array(TOKENIZER.encode(text), np.int32), np.zeros(0, np.int32), answer, "")
        for text, answer in (("a?", "6"), ("b?", "3"))
    ]
    sampling = SamplingParams(100, stop_token_ids=(END,))
    with RewardPool(Selection(("environment_reward",), (0.1,)), failure_value=-1.0) as rewards:
        samples = Sampler(episodes, rewards, TOKENIZER).sample(records, 2, sampling, (1,))
    assert [sample.reward.total for sample in samples] == pytest.approx([0.9, 1.0, -0.1, 1.0])
    assert [bool(sample.reward.failures) for sample in samples] == [False, False, True, False]
    assert tool_metrics(samples)["turns/mean"] == 1.25


def test_environments_are_checked_before_the_run(tmp_path):
    (tmp_path / "half.py").write_text("class Half:\n    def reset(self, answer): ...\n")
    for name, message in (
        ("games/a.py:Guess, games/b.py:Guess", "two are called the same"),
        ("guess", "write path/to/file.py:Class"),
        ("gone.py:Guess", "there is no file gone.py"),
    ):
        with pytest.raises(UserError, match=message):
            check_environment(name)
    check_environment("", ["accuracy_reward"])
    with pytest.raises(UserError, match="environment_reward needs 'tools.environment'"):
        check_environment("", ["environment_reward"])
    with pytest.raises(UserError, match="has no method step"):
        EpisodePool(f"{tmp_path / 'half.py'}:Half", 1, 5.0, 1024)


def test_a_record_must_be_able_to_choose_among_several(tmp_path):
    names = f"{tmp_path / 'a.py'}:One, {tmp_path / 'b.py'}:Two"
    for name in "ab":
        (tmp_path / f"{name}.py").write_text("class One: pass\nclass Two: pass\n")
    with pytest.raises(UserError, match="has One, Two, but prompts have no column 'environment' that chooses"):
        check_columns(names, ("level",), "prompts")
    check_columns(names, ("environment",), "prompts")


def test_returns_are_told_by_environment():
    def played(name, earned):
        one = make_sample([1], [2], episode_return=earned)
        return with_prompt(one, extra={"environment": name} if name else {})

    samples = [played("a", 1.0), played("a", 3.0), played("b", -1.0), played("b", math.nan), played("", 9.0)]
    found = {name: value for name, value in tool_metrics(samples).items() if name.startswith("environments/")}
    assert found == {"environments/a": 2.0, "environments/b": -1.0}
