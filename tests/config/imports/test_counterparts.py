"""The importers' tables against our keys and docs/migration.md: none of ours is forgotten, none of theirs swallowed."""

import dataclasses
import fnmatch
import random
import re
from pathlib import Path

import pytest

from mindrlhf.commands.config import STACK_NAMES
from mindrlhf.config.imports import counterparts
from mindrlhf.config.imports.convert import STACKS
from mindrlhf.config.imports.rules import NoCounterpartError, Source, find
from mindrlhf.config.schema import GrpoConfig

DOCS = Path(__file__).parents[3] / "docs"
KEYS = {
    f"{section.name}.{key.name}"
    for section in dataclasses.fields(GrpoConfig)
    for key in dataclasses.fields(section.metadata["section"])
}
# Values that keys of launch scripts have: switches, numbers, names of each stack's choices.
PROBES = (
    True, False, 0, 1, 2, 8, 64, 0.5, 1e-6, "x", "full", "gae", "ppo", "grpo", "cosine", "linear", "group_norm", "R3",
    "bfloat16", "bf16", "token", "k3", "topk", "adaptive", "steps", "cispo", "sapo", "dapo", "sequence", "icepop",
    "group", "tis",     "token_truncate", "sequence_mask", "vanilla", "token-mean", "cpu", "remax",
    "reinforce_plus_plus", "nonzero_std", "hermes", "muon",
    [0.1, 0.9], ["wandb"], {"top_p": 0.9, "temperature": 1.0, "top_k": 5}, {"a": "b"}, "q_proj", "wandb",
)  # fmt: skip


# Other keys that a rule asks for, with values that a random choice would rarely meet.
HINTS = {
    "distillation.distillation_loss.loss_mode": ("forward_kl_topk",),
    "distillation.distillation_loss.topk": (64,),
    "algorithm.kl_ctrl.type": ("adaptive",),
    "algo.advantage.is_correction_type": ("icepop", "tis"),
    "algo.advantage.is_correction_threshold": ([0.5, 5.0],),
    "use_rslora": (True,),
    "use_dora": (False,),
    "lora_target_modules": (["q_proj"], "all-linear"),
}


def known(stack):
    rules = STACKS[stack].RULES.values()
    return (counterparts.carried(rules) | counterparts.named(rules)) & KEYS


@pytest.mark.parametrize("stack", STACKS)
def test_every_key_of_ours_has_a_counterpart_or_a_reason(stack):
    missing = KEYS - known(stack) - counterparts.reasons(stack).keys()
    assert not missing, f"say in mindrlhf/config/imports what {stack} has for them, or why it has none"


def test_reasons_are_of_keys_that_there_are_and_that_nothing_carries_over():
    assert STACKS.keys() == counterparts.WITHOUT.keys() - {counterparts.ALL} == set(STACK_NAMES)
    for stack, reasons in counterparts.WITHOUT.items():
        listed = [key for keys in reasons.values() for key in keys.split()]
        assert set(listed) <= KEYS and len(set(listed)) == len(listed)
        if stack != counterparts.ALL:
            assert not set(listed) & known(stack)
    # What "no stack has" is not carried over by most of them after all.
    everywhere = [key for keys in counterparts.WITHOUT[counterparts.ALL].values() for key in keys.split()]
    assert all(sum(key in known(stack) for stack in STACKS) <= 1 or "observe" in key for key in everywhere), everywhere


class RandomSource(Source):
    """Every other key has some value."""

    def __init__(self, name, value, defaults, rng):
        super().__init__({name: value}, defaults)
        self.rng = rng
        self.given |= {
            f"distillation.teacher_models.{one}.model_path": "teacher" for one in ("one", "two")[: rng.choice((1, 2))]
        }

    def get(self, name, default=None):
        if name not in self.given:
            usual = self.defaults.get(name, default)
            self.given[name] = self.rng.choice(HINTS.get(name, PROBES)) if self.rng.random() < 0.4 else usual
        return self.given[name]


def reached_by(name, rule, defaults, rng):
    """Our keys that a rule gives for some values of its key and of the others."""
    found = set()
    for _ in range(4000):
        value = rng.choice(PROBES)
        try:
            found |= rule.translate(value, RandomSource(name, value, defaults, rng)).keys()
        except NoCounterpartError as error:
            found |= error.values.keys()
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
            continue
        if found >= set(rule.targets):
            break
    return found


@pytest.mark.parametrize("stack", STACKS)
def test_every_target_is_a_key_of_ours_that_some_value_reaches(stack):
    rng, defaults = random.Random(0), STACKS[stack].DEFAULTS
    for name, rule in STACKS[stack].RULES.items():
        if rule.translate is not None:
            assert set(rule.targets) <= KEYS, name
            assert reached_by(name.replace("*", "some"), rule, defaults, rng) == set(rule.targets), name


@pytest.mark.parametrize("stack", STACKS)
def test_a_key_of_its_own_comes_before_a_pattern_and_a_longer_pattern_before_a_shorter(stack):
    rules = STACKS[stack].RULES
    patterns = [name for name in rules if "*" in name]
    for name, rule in rules.items():
        instance = name.replace("*", "some")
        fitting = [pattern for pattern in patterns if fnmatch.fnmatchcase(instance, pattern)]
        letters = len(name.replace("*", ""))
        closer = [pattern for pattern in fitting if len(pattern.replace("*", "")) > letters]
        if "*" not in name or not closer:
            assert find(rules, instance) is rule or letters == len(max(fitting, key=len).replace("*", ""))
    # A pattern that says "of no use" beside keys that are carried over names neither them nor what is theirs.
    for pattern in patterns:
        if rules[pattern].translate is None:
            assert pattern.strip("*."), f"{pattern} swallows everything"


@pytest.mark.parametrize("stack", STACKS)
def test_defaults_are_of_keys_that_are_known(stack):
    module = STACKS[stack]
    assert all(find(module.RULES, name) is not None for name in module.DEFAULTS)
    assert all(find(module.RULES, name) is not None for name in getattr(module, "ALIASES", {}).values())


def test_advice_names_keys_and_pages_that_there_are():
    for module in STACKS.values():
        for rule in module.RULES.values():
            for section, key in re.findall(r"`?\b([a-z_]+)\.([a-z_]+)\b`?", rule.text):
                is_theirs = find(module.RULES, f"{section}.{key}") is not None
                if section in {name.split(".")[0] for name in KEYS} and not is_theirs and key != "md":
                    assert f"{section}.{key}" in KEYS, rule.text
            for page in re.findall(r"docs/([\w-]+)\.md", rule.text):
                assert (DOCS / f"{page}.md").is_file(), rule.text


def test_counts_of_keys_stand_in_the_page():
    page = (DOCS / "evidence" / "migration.md").read_text()
    for stack, module in STACKS.items():
        numbers = counterparts.counts(module)
        row = f"| `{stack}` | {numbers['carried']} | {numbers['by hand']} | {numbers['explained']} |"
        assert row in page, row


def test_the_words_of_the_page_are_those_of_the_tables():
    """Each cell names keys of a stack that set our key of that row, or that a rule which does reads."""
    page = (DOCS / "migration.md").read_text()
    table = page[page.index("## The words") : page.index("## What is different")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    stacks = {"verl": "verl", "MindSpeed-RL": "mindspeed-rl", "mindrlhf 0.5": "mindrlhf", "TRL": "trl"}
    stacks |= {"OpenRLHF": "openrlhf", "slime": "slime"}
    checked = 0
    for row in rows[2:]:
        section = re.search(r"`([a-z_]+)\.", row[0])[1]
        ours = [name if "." in name else f"{section}.{name}" for name in re.findall(r"`([a-z_.]+)", row[0])]
        assert set(ours) <= KEYS, row[0]
        for title, cell in zip(rows[0][1:], row[1:], strict=True):
            rules = STACKS[stacks[title]].RULES
            # The last part of a key is enough: the page leaves out the sections.
            names = re.findall(r"`([\w.]+)`", cell)
            found = {name: [rule for key, rule in rules.items() if f".{key}".endswith(f".{name}")] for name in names}
            assert all(found.values()), (title, found)
            assert not names or any(set(rule.targets) & set(ours) for some in found.values() for rule in some), title
            checked += len(names)
    assert checked > 60


@pytest.mark.parametrize("stack", STACKS)
def test_the_page_knows_the_stack(stack):
    assert f"`{stack}`" in (DOCS / "evidence" / "migration.md").read_text()
