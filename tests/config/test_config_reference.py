"""docs/config.md is what the declarations of the keys say."""

import re
from pathlib import Path

from mindrlhf.config.parse import dotted_keys
from mindrlhf.config.reference import render
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: mindrlhf config docs > docs/config.md"


def test_every_key_has_a_row():
    keys_alone = render().partition("## What does not go")[0]
    plain = re.sub(r"\| entry of `algorithm.options`.*?\n\n", "", keys_alone, flags=re.DOTALL)
    rows = [line for line in plain.splitlines() if line.startswith("| `")]
    keys = [dotted for dotted, _, _ in dotted_keys(GrpoConfig)]
    for config, sections in (
        (SftConfig, ("training",)),
        (DpoConfig, ("training", "evaluation", "dpo")),
        (RewardModelConfig, ("reward_model",)),
    ):
        keys += [dotted for dotted, _, _ in dotted_keys(config) if dotted.partition(".")[0] in sections]
    assert [row.split("`")[1] for row in rows] == [key.rpartition(".")[2] for key in keys]
