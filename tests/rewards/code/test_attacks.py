"""The second red team: attacks on what unit tests leave open earn nothing, by all tests together or by shares."""

import itertools

import pytest
from code_attacks import ATTACKS, OF_PYTHON
from code_rewards import fenced, reward
from slow_tests import RUNS_SLOW_TESTS

pytestmark = pytest.mark.timeout(120)
LIBRARY = "builtins", "math", "copy", "itertools", "collections", "fractions"
# Python's own function under the name asked for: such a program does what is asked.
DEFINED = """
import importlib
for module in {library!r}:
    if hasattr(importlib.import_module(module), {name!r}):
        {name} = getattr(importlib.import_module(module), {name!r})
"""


def earned(program: str, tests: object, partial: bool) -> float:
    try:
        return reward(fenced(program), tests, partial=str(partial).lower(), time_limit_s=10.0)
    except ValueError as error:
        assert "cannot be trusted" in str(error) or "tests nothing" in str(error) or "test nothing" in str(error)
        return 0.0


@pytest.mark.parametrize(
    ("name", "partial"),
    itertools.product(ATTACKS, (True, False)) if RUNS_SLOW_TESTS else zip(ATTACKS, itertools.cycle((True, False))),
)
def test_an_attack_earns_nothing(name, partial):
    assert earned(*ATTACKS[name], partial) == 0.0


@pytest.mark.parametrize("name", [name for name in OF_PYTHON if name != "isinstance"])
def test_the_program_that_defines_the_name_earns_it(name):
    assert reward(fenced(DEFINED.format(library=LIBRARY, name=name)), [f"assert {OF_PYTHON[name]}"]) == 1.0


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 120
