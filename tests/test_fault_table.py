"""The table of faults names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MATRIX = "tests/jobs/test_fault_matrix.py"


def named_tests() -> set[tuple[str, str]]:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    return {(file or MATRIX, name) for file, name in re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", page)}


def functions(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_every_test_that_the_table_names_is_there():
    named = named_tests()
    assert len(named) > 15
    assert {(file, name) for file, name in named if name not in functions(file)} == set()


def test_every_test_of_the_matrix_is_in_the_table():
    assert functions(MATRIX) == {name for file, name in named_tests() if file == MATRIX}
