"""The tables of cases beside this file: pairs that people hold for equal or not, each under its reason.

A line ``prediction == reference`` or ``prediction != reference`` belongs to the reason in the last line that begins
with ``#``. ``\\u2009`` stands for that character, ``⏎`` for a line break.
"""

import re
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).with_name("cases")
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


class Case(NamedTuple):
    prediction: str
    reference: str
    is_equal: bool
    reason: str


def read_cases(name: str) -> list[Case]:
    """The cases of one table."""
    cases, reason = [], ""
    for line in (DIRECTORY / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line:
            pair = re.fullmatch(r"(.*) (==|!=) (.*)", line)
            assert pair is not None and reason, line
            texts = [_ESCAPE.sub(lambda found: chr(int(found[1] or found[2], 16)), text) for text in pair.group(1, 3)]
            cases.append(Case(texts[0].replace("⏎", "\n"), texts[1], pair[2] == "==", reason))
    return cases


def table_names() -> list[str]:
    """The tables of pairs of answers."""
    return sorted(path.stem for path in DIRECTORY.glob("*.txt") if not path.stem.startswith("completions"))


def completion_tables() -> list[str]:
    """The tables of whole completions."""
    return sorted(path.stem for path in DIRECTORY.glob("completions*.txt"))
