"""docs/config.md is what the declarations of the keys say."""

from pathlib import Path

from mindrlhf.config.loader import dotted_keys
from mindrlhf.config.reference import render
from mindrlhf.config.schema import GrpoConfig, SftConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: mindrlhf config docs > docs/config.md"


def test_every_key_has_a_row():
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    keys = [dotted for dotted, _, _ in dotted_keys(GrpoConfig)]
    keys += [dotted for dotted, _, _ in dotted_keys(SftConfig) if dotted.startswith("supervised.")]
    assert [row.split("`")[1] for row in rows] == [key.rpartition(".")[2] for key in keys]
