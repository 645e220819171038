"""Every line of the pages that promise something says which test holds it, and there are these tests.

A line is a row of a table or an item of a list. It names a test itself, or its first cell (the first four words of an
item) stands in the first column of the table of ``tests/promises``; of what is no promise that table says "none" and
why. Sections of prose alone stand there with their headings.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
# Each with a number of lines and one of tests that it has more than, so that neither is read past.
PAGES = {
    "security": (25, 40), "faults": (25, 40),
    "rewards": (20, 45), "answers": (12, 20), "programs": (30, 12), "judges": (3, 15),
}  # fmt: skip
TEST = re.compile(r"`(?:(tests/[\w/]+\.py)(?:::)?)?(test_\w+)?`")
NAMES_ALONE = "tests/jobs/test_fault_matrix.py"  # of what is named without a file
# Tables that say what was counted or measured, by the first and the last cell of their heads.
MEASURED = {
    ("class", "held as a user without namespaces"),
    ("parser", "unexpected"),
    ("what", "before these rules"),
    ("stage", "launcher"),
    ("", "step of `mindrlhf train`, 4 prompts x 8 samples x 64 tokens"),
    ("", "agreement"),
    ("verifier", "honest responses of the same forms that earn 1"),
    ("tests", "ratio in processor time"),
    ("process", "files"),
}


class Line(NamedTuple):
    section: str
    head: tuple[str, str]  # of its table
    key: str
    text: str


def read(page: str, folder: str = "docs") -> str:
    text = (ROOT / folder / f"{page}.md").read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip())[1:-1]]


def sections(text: str) -> Iterator[tuple[str, str]]:
    heading = ""
    for part in re.split(r"^(#+ .*)$", text, flags=re.M):
        if part.startswith("#"):
            heading = part.lstrip("# ")
        else:
            yield heading, part


def lines_of(text: str) -> Iterator[Line]:
    for section, body in sections(text):
        head, rows = ("", ""), body.splitlines()
        for number, row in enumerate(rows):
            if row.startswith("|") and not row.startswith("|-"):
                first, *_, last = cells(row)
                if rows[number + 1 : number + 2] and rows[number + 1].startswith("|-"):
                    head = (first, last)
                else:
                    yield Line(section, head, first, row)
            elif item := re.match(r"(?:- |\d+\. )", row):
                words = [row[item.end() :]]
                for further in rows[number + 1 :]:
                    if not further.startswith("  "):
                        break
                    words.append(further.strip())
                yield Line(section, ("", "item"), " ".join(" ".join(words).split()[:4]), " ".join(words))


def held(page: str) -> dict[str, str]:
    """Return the tests of each line and section that the page's table names, or why there are none."""
    rows = lines_of(read(page, "tests/promises"))
    return {key: cells(line.text)[-1] for line in rows for key in line.key.split("; ")}


def promises(page: str) -> list[Line]:
    return [line for line in lines_of(read(page)) if line.head not in MEASURED]


def named(text: str) -> list[tuple[str, str]]:
    return [(file or NAMES_ALONE, test) for file, test in TEST.findall(text) if file or test]


@pytest.mark.parametrize("page", PAGES)
def test_every_line_that_promises_something_names_its_test(page):
    tests, lines = held(page), promises(page)
    assert len(lines) > PAGES[page][0]
    assert [line for line in lines if not named(line.text) and line.key not in tests] == []
    assert [key for key, named_ in tests.items() if not named(named_) and not named_.startswith("none: ")] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_section_of_prose_names_its_test(page):
    tests, of_prose = held(page), []
    for section, body in sections(read(page)):
        prose = [part for part in body.split("\n\n") if part.strip() and not re.match(r"\s*(\||- |\d+\. )", part)]
        if any(map(named, prose)) or not prose:
            continue
        of_prose.append(section)
    assert [section for section in of_prose if section not in tests] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_that_a_page_names_are_there(page):
    found = named(read(page) + read(page, "tests/promises"))
    assert len(found) > PAGES[page][1]
    for file, test in found:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not test or re.search(rf"^def {test}\(", source, re.M), f"there is no {file}::{test}"


@pytest.mark.parametrize("page", PAGES)
def test_no_test_is_named_for_a_line_that_is_gone(page):
    keys = {line.key for line in promises(page)} | {section for section, _ in sections(read(page))}
    assert [key for key in held(page) if key not in keys] == []


def test_a_line_without_a_test_is_found():
    text = "# T\n\n- it never lies at all\n- it sleeps, `tests/a.py::test_b`\n\n| a | b |\n|---|---|\n| x | y |\n"
    assert [line.key for line in lines_of(text) if not named(line.text)] == ["it never lies at", "x"]
