"""Unit tests are run as the harness of their data set runs them, or refused by name; none is taken for a pass."""

import json

import pytest
from code_forms import FORMS, REFUSED
from code_rewards import fenced, reward
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.rewards.lint import lint
from mindrlhf.rewards.types import RewardInput
from mindrlhf.sandbox.code_tests.unit_tests import UnitTests

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("name", FORMS)
def test_a_right_program_earns_1_and_a_wrong_and_an_empty_one_nothing(name):
    right, wrong, tests = FORMS[name]
    assert reward(fenced(right), tests) == 1.0
    assert reward(fenced(wrong), tests) == 0.0
    if RUNS_SLOW_TESTS or list(FORMS).index(name) % 4 == 0:
        assert reward(fenced("pass"), tests) == 0.0


@pytest.mark.parametrize("answer", REFUSED)
def test_what_tests_nothing_is_refused_by_name(answer):
    with pytest.raises(ValueError, match=REFUSED[answer]):
        UnitTests.parse(answer)
    assert answer == "" or "\n" not in message_of(answer)


def message_of(answer: str) -> str:
    try:
        UnitTests.parse(answer)
    except ValueError as error:
        return str(error)
    raise AssertionError("it is not refused")


def test_some_of_several_functions_that_pytest_collects_are_not_enough():
    tests = "def test_one():\n    assert add(1, 2) == 3\ndef test_two():\n    assert add(2, 2) == 4\n"
    assert reward(fenced("def add(a, b):\n    return 3"), tests) == 0.0
    assert reward(fenced("def add(a, b):\n    return a + b"), json.dumps([tests])) == 1.0


def test_rewards_check_says_which_unit_tests_test_nothing():
    completion = fenced("def add(a, b):\n    return a + b")
    answers = ("print(add(1, 2))", "assert add(1, 2) != 7", "assert add(1, 2) == 3")
    samples = [RewardInput(index, completion, answer) for index, answer in enumerate(answers)]
    errors = [text for level, text in lint("code_execution", samples, {}, timeout_s=30.0) if level == "error"]
    assert len(errors) == 1 and errors[0].startswith("failed on 2 of 3 samples")
    assert "nothing that it runs asserts anything" in errors[0]
    assert "they pass whatever the program returns" in errors[0]


def test_a_test_that_takes_long_is_looked_at_for_a_moment_only():
    slow = (
        "import time\nfor _ in range(2):\n    try:\n        time.sleep(0.4)\n    except BaseException:\n        pass\n"
    )
    # Fifteen constants would take twelve seconds.
    program = fenced("def add(a, b):\n    return a + b")
    assert reward(program, slow + "assert add(1, 2) == 3", time_limit_s=8) == 1.0


@pytest.mark.parametrize(
    ("answer", "verifier", "is_refused"),
    [
        ("print(add(1, 2))", "code_execution", True),
        ("print(add(1, 2))", "", False),
        ("42", "", False),
        ("42", "accuracy_reward,code_execution", True),
        ("assert that the answer is 42", "", False),
        ("assert True", "", True),
        ("assert True", "llm_judge", False),
        ('["assert True"]', "", True),
        ('{"outputs": [1]}', "", False),
        ('{"inputs": [""], "outputs": [""]}', "", True),
        ('["names a drug", "assert yourself"]', "", False),
        ("def check(candidate):\n    assert candidate(1) == 1", "", True),
    ],
)
def test_which_records_are_checked_when_data_is_built(answer, verifier, is_refused):
    if not is_refused:
        UnitTests.check_record(answer, verifier)
        return
    with pytest.raises(ValueError, match="nothing|no unit tests"):
        UnitTests.check_record(answer, verifier)
