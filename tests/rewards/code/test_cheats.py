"""Programs that cheat earn nothing on any kind of test, or the test is refused by name; honest ones keep theirs."""

import itertools

import code_cheats as cheats
import pytest
from code_honest import HONEST
from code_rewards import fenced, reward
from slow_tests import RUNS_SLOW_TESTS

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("kind", cheats.TESTS)
def test_a_program_that_knows_the_values_passes_every_test(kind):
    assert reward(fenced(cheats.HONEST), cheats.TESTS[kind], partial="true") == 1.0


def each_cheat_on_one_kind() -> list[tuple[str, str]]:
    kinds = list(cheats.TESTS)
    return [(name, kinds[place % len(kinds)]) for place, name in enumerate(cheats.CHEATS)]


@pytest.mark.parametrize(
    ("name", "kind"), itertools.product(cheats.CHEATS, cheats.TESTS) if RUNS_SLOW_TESTS else each_cheat_on_one_kind()
)
def test_cheats_pass_no_test(name, kind):
    try:
        earned = reward(fenced(cheats.CHEATS[name]), cheats.TESTS[kind], partial="true", time_limit_s=4.0)
    except ValueError as error:
        assert "cannot be trusted" in str(error)
        earned = 0.0
    assert earned == 0.0


@pytest.mark.parametrize(
    ("source", "test", "reason"),
    [
        ("def f(x): return 0\ndef g(x): return 0", "assert f(3) == g(3)", "both sides"),
        ("def f(x): return x\ndef g(x): return x", "assert g(f('abc')) == 'abc'", "by the program's own 'g'"),
        (
            "def poly(c, x): return 0\ndef f(c): return 1",
            "def check(candidate):\n    s = candidate([1, 2])\n    assert abs(poly([1, 2], s)) < 1e-4\ncheck(f)",
            "by the program's own 'poly'",
        ),
        (
            "class P:\n    def __eq__(self, o): return True\ndef f(x): return P()",
            "assert f(3) == P()",
            "both sides",
        ),
        (
            "class P:\n    def __eq__(self, o): return True",
            "a, b = P(), [P()]\nassert a in b",
            "both sides",
        ),
        ("def f(l):\n    l.clear()\n    return []", "l = [3, 1]\nf(l)\nassert f(l) == sorted(l)", "both sides"),
        ("class E(Exception): pass\ndef f(): raise E", "try:\n    f()\nexcept E:\n    pass", "exception class"),
        ("class P: pass", "assert isinstance(P(), P)", "of a class of the program's own"),
        ("def f(x): return x", "class T: pass\nassert f(T()) is not None", "object of its own class"),
        ("def sum(a, b): return 3\ndef abs(x): return 0", "assert abs(sum(1, 2) - 3) < 1", "only one can be"),
    ],
)
def test_tests_that_a_program_could_pass_by_its_own_definitions_are_refused_by_name(source, test, reason):
    with pytest.raises(ValueError, match=reason):
        reward(fenced(source), [test])


def test_own_helpers_can_be_allowed():
    source = "def poly(c, x): return c[0] + c[1] * x\ndef f(c): return -c[0] / c[1]"
    tests = ["x = f([1, 2])\nassert abs(poly([1, 2], x)) < 1e-4"]
    with pytest.raises(ValueError, match="poly"):
        reward(fenced(source), tests)
    assert reward(fenced(source), tests, allow_own_helpers="true") == 1.0


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_keep_their_reward(name):
    source, answer = HONEST[name]
    assert reward(fenced(source), answer) == 1.0


def test_there_are_enough_of_each():
    assert len(cheats.CHEATS) >= 60
    assert len(HONEST) >= 100


@pytest.mark.parametrize(
    "data", ['{"int": []}', '{"float": {}}', '{"dict": 1}', '{"dict": [1]}', '{"tuple": 3}', "{}", '{"float": "nan"}']
)
def test_answers_that_break_the_protocol_are_wrong(data):
    source = f'import os\nos.write(3, b\'{{"loaded": true}}\\n{{"value": {data}}}\\n\')\nos._exit(0)'
    assert reward(fenced(source), {"fn_name": "f", "inputs": [[1]], "outputs": [{"a": 1}]}) == 0.0
