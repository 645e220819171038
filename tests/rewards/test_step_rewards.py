"""Verifiers that reward each turn, or each token that the model wrote, in processes of their own."""

import pytest

from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput, RewardResult

pytestmark = pytest.mark.timeout(120)

VERIFIERS = """
import numpy as np

def by_turn(completion, answer, turn_texts):
    return [float(len(text)) for text in turn_texts]

def by_token(completion, answer, *, token_texts):
    return np.array([text == answer for text in token_texts], float).tolist()

def some(completion, answer, turn_texts):
    return {"short": [1.0], "nan": [1.0, float("nan")], "text": ["1", "2"], "number": 3.0, "huge": [1e15, 1e15]}[answer]

def unread(completion, answer):
    return [1.0, 2.0]
"""


@pytest.fixture
def verifier(tmp_path):
    path = tmp_path / "process.py"
    path.write_text(VERIFIERS)
    return lambda name: f"{path}:{name}"


def sample(answer="b"):
    return RewardInput(7, "abcd", answer, turn_texts=("ab", "b d"), token_texts=("a", "b", "b", " ", "d"))


def score(one, *verifiers, weights=None, **options):
    selection = Selection(tuple(verifiers), weights or (1.0,) * len(verifiers), **options)
    with RewardPool(selection, failure_value=-1.0) as pool:
        return pool.reads_steps, pool.score([one])[0]


def test_the_part_is_the_sum_of_its_steps(verifier):
    reads, result = score(sample(), verifier("by_turn"), verifier("by_token"), weights=(0.5, 2.0))
    steps = {"by_turn": [2.0, 3.0], "by_token": [0.0, 1.0, 1.0, 0.0, 0.0]}
    assert reads and result == RewardResult(7, {"by_turn": 5.0, "by_token": 2.0}, 6.5, {}, steps)


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("some", "short", "returned 1 numbers for 2 turns or tokens"),
        ("some", "nan", "which are no finite numbers"),
        ("some", "text", "which are no finite numbers"),
        ("some", "huge", "which are no finite numbers"),
        ("unread", "", "which is no finite number"),
    ],
)
def test_what_is_no_reward_of_steps_is_a_failure_of_this_sample(verifier, name, answer, reason):
    _, result = score(sample(answer), verifier(name))
    assert result.parts == {name: -1.0} and result.steps == {} and reason in result.failures[name]


def test_one_that_may_reward_steps_may_reward_the_whole(verifier):
    _, result = score(sample("number"), verifier("some"))
    assert result == RewardResult(7, {"some": 3.0}, 3.0)


def test_a_completion_of_a_file_is_one_turn(verifier):
    _, result = score(RewardInput(0, "abcd", "b"), verifier("by_turn"))
    assert result.steps == {"by_turn": [4.0]} and result.total == 4.0


def test_no_texts_are_made_for_verifiers_that_read_none(verifier):
    reads, _ = score(RewardInput(0, "c", "a"), verifier("unread"))
    assert not reads


def test_weights_are_by_the_name_of_the_part():
    from mindrlhf.config.reward import RewardSection
    from mindrlhf.training.loop.signals import part_weights

    two = RewardSection(verifier_function=("length", "a/b.py:f"), verifier_weight=(2.0, 3.0), model_path="m")
    assert part_weights(two) == {"length": 2.0, "f": 3.0, "reward_model": 1.0}
    assert part_weights(RewardSection(verifier_function=("length",))) == {"length": 1.0}
