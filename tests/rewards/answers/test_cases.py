"""The tables of cases, and how large they are."""

import case_tables
import pytest
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.errors import UserError
from mindrlhf.rewards.answers import marks
from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.registry import built_in

PAIRS = [case for name in case_tables.table_names() for case in case_tables.read_cases(name)]
# Equal in value to the number asked for, and still to be computed: as answers of a response they earn nothing.
TO_BE_COMPUTED = {
    *("3 \\cdot 4", "3\\times4", "3+4", "\\frac{1}{1+\\frac{1}{2}}", "5\u22127", "2\xd73", "2\xb73", "1-\\frac{1}{2}"),
    *("2\\times3", "4 x 5", "7 \\div 2", "6\xf73", "10!/8!", "\\frac{10!}{8!}", "3 \\cdot 6", "3(6)", "(3)(6)", "20-2"),
    *("36 \\div 2", "2^3 \\cdot 3^2", "2^3 3^2", "2^{1000}-2^{1000}+1", "\\frac{100!}{99!}"),
}
COMPLETIONS = [case for name in case_tables.completion_tables() for case in case_tables.read_cases(name)]


@pytest.mark.parametrize("table", case_tables.table_names())
def test_pairs(table):
    cases = case_tables.read_cases(table)
    assert [case for case in cases if answers_equal(case.prediction, case.reference) is not case.is_equal] == []


@pytest.mark.parametrize("table", case_tables.completion_tables())
def test_completions(table):
    cases, reward = case_tables.read_cases(table), built_in("accuracy_reward")
    assert [case for case in cases if reward(case.prediction, case.reference) != case.is_equal] == []


def test_every_language_has_the_same_list_of_forms():
    """And each language of the table of marks has that list."""
    lists: dict[str, list[tuple[str, bool]]] = {}
    for case in case_tables.read_cases("completions_by_language"):
        lists.setdefault(case.reason.partition(":")[0], []).append((case.reference, case.is_equal))
    assert lists.keys() == marks.LANGUAGES.keys() and len(lists["English"]) >= 20
    assert [language for language, forms in lists.items() if forms != lists["English"]] == []


def test_a_table_of_the_user_adds_a_language(tmp_path, monkeypatch):
    monkeypatch.setattr(marks, "LANGUAGES", dict(marks.LANGUAGES))
    path, reward = tmp_path / "marks.json", built_in("accuracy_reward")
    path.write_text('{"Italian": {"answer": "risposta", "equals": "è", "denies": "non", "decimal_comma": "yes"}}')
    texts = ("La risposta è 3,5. Ho 2 gatti.", "La risposta non è 3,5.")
    assert [reward(text, "3.5") for text in texts] == [0, 0]
    assert [reward(text, "3.5", marks=str(path)) for text in texts] == [1, 0]
    marks.pattern.cache_clear()
    for text in ("[]", '{"Italian": {"verbs": "è"}}', '{"Italian": {"answer": 1}}', "{"):
        (tmp_path / "other.json").write_text(text)
        marks.extend.cache_clear()
        with pytest.raises(UserError, match="other.json"):
            marks.extend(str(tmp_path / "other.json"))


def test_the_tables_are_large_and_two_sided():
    cases = [*PAIRS, *COMPLETIONS]
    assert len(cases) >= 900
    assert sum(case.is_equal for case in cases) >= 300
    assert sum(not case.is_equal for case in cases) >= 300
    assert len({(case.prediction, case.reference) for case in PAIRS}) == len(PAIRS)
    assert len({(case.prediction, case.reference) for case in COMPLETIONS}) == len(COMPLETIONS)


@pytest.mark.parametrize("mark", ["so \\boxed{{{}}}", "so\n#### {}"], ids=["box", "hashes"])
def test_an_equal_answer_is_right_where_it_is_marked_if_it_is_a_result(mark):
    reward = built_in("accuracy_reward")
    equal = [case for case in PAIRS if case.is_equal and not ("boxed" in mark and "boxed" in case.prediction)]
    if not RUNS_SLOW_TESTS:  # by day one half in each mark
        equal = equal["boxed" in mark :: 2]
    texts = [(mark.format(case.prediction), case) for case in equal]
    assert [
        case for text, case in texts if reward(text, case.reference) != (case.prediction not in TO_BE_COMPUTED)
    ] == []


def test_what_is_to_be_computed_stands_in_the_tables():
    equal = {case.prediction for case in PAIRS if case.is_equal}
    assert TO_BE_COMPUTED - equal == set()
