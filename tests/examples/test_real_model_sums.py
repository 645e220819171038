"""The second tutorial's problems and reward."""

from pathlib import Path

import pytest
from script_files import load_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_model"


@pytest.fixture(scope="module")
def sums():
    return load_script("examples/real_model/sums.py")


def test_sums_are_right_and_in_one_of_the_files_only(sums):
    train, test = sums.make_problems()
    assert (len(train), len(test)) == (1165, 200)
    pairs = []
    for problems in (train, test):
        pairs.append(set())
        for problem in problems:
            _, _, first, sign, second, *_ = problem["question"].replace("?", " ").split()
            value = int(first) + int(second) if sign == "+" else int(first) - int(second)
            assert problem["answer"] == f"#### {value}"
            pairs[-1].add(frozenset((first, second)))
    assert not pairs[0] & pairs[1]


@pytest.mark.parametrize(
    "completion, finish_reason, reward",
    [
        ("21", "stop", 1.0),
        ("14 + 7 = 21.", "stop", 1.0),
        ("14 + 7", "stop", 0.0),
        ("21 is 14 + 7", "stop", 0.0),
        ("The answer is 21", "length", 0.0),
        ("21.5", "stop", 0.0),
        ("-21", "stop", 0.0),
        ("twenty-one", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_the_reward_is_for_the_last_number_of_a_finished_response(sums, completion, finish_reason, reward):
    assert sums.last_number(completion, "21", finish_reason=finish_reason) == reward
