"""The tables of cases, and how large they are."""

import case_tables
import pytest

from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.registry import built_in

PAIRS = [case for name in case_tables.table_names() for case in case_tables.read_cases(name)]
COMPLETIONS = case_tables.read_cases("completions")


def name_of(case: case_tables.Case) -> str:
    return ascii(f"{case.prediction} {'==' if case.is_equal else '!='} {case.reference}")


@pytest.mark.parametrize("case", PAIRS, ids=name_of)
def test_pair(case):
    assert answers_equal(case.prediction, case.reference) is case.is_equal, case.reason


@pytest.mark.parametrize("case", COMPLETIONS, ids=name_of)
def test_completion(case):
    assert built_in("accuracy_reward")(case.prediction, case.reference) == case.is_equal, case.reason


def test_the_tables_are_large_and_two_sided():
    cases = [*PAIRS, *COMPLETIONS]
    assert len(cases) >= 900
    assert sum(case.is_equal for case in cases) >= 300
    assert sum(not case.is_equal for case in cases) >= 300
    assert len({(case.prediction, case.reference) for case in PAIRS}) == len(PAIRS)
    assert len({(case.prediction, case.reference) for case in COMPLETIONS}) == len(COMPLETIONS)


@pytest.mark.parametrize("case", [case for case in PAIRS if case.is_equal], ids=name_of)
def test_an_equal_answer_is_equal_in_a_box_and_behind_hashes(case):
    if "boxed" not in case.prediction:
        assert built_in("accuracy_reward")(f"so \\boxed{{{case.prediction}}}", case.reference) == 1.0
    assert built_in("accuracy_reward")(f"so\n#### {case.prediction}", case.reference) == 1.0
