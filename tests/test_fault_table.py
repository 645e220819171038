"""The tables of faults name tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MATRIX = "tests/jobs/test_fault_matrix.py"
PROMISES = ROOT / "tests" / "promises" / "faults.md"  # the tests of each row of docs/faults.md


def named_tests() -> set[tuple[str, str]]:
    page = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "faults.md", PROMISES))
    return {(file or MATRIX, name) for file, name in re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", page)}


def functions(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_every_test_that_the_table_names_is_there():
    named = named_tests()
    assert len(named) > 15
    assert {(file, name) for file, name in named if name not in functions(file)} == set()


def test_every_test_of_the_matrix_is_in_the_table():
    assert functions(MATRIX) == {name for file, name in named_tests() if file == MATRIX}


def rows(page: Path) -> list[list[str]]:
    """The cells of the rows of all tables that have a column of tests."""
    found, has_tests = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            has_tests = False
        elif cells[-1].strip(" |") in ("test", "tests"):
            has_tests = True
        elif has_tests and not line.startswith("|--"):
            found.append(cells)
    return found


def test_every_row_of_the_tables_of_faults_names_a_test():
    table = rows(PROMISES)
    assert len(table) > 50
    assert [row[0] for row in table if "test_" not in row[-1] and not row[-1].startswith("none:")] == []
