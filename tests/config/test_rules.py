"""Rules between keys: a message names the key, and what it says to do satisfies it; no changed key is left unread."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from mindrlhf.config.load import CONFIGS, load_grpo_config, read_config
from mindrlhf.config.parse import dotted_keys
from mindrlhf.config.unread import conditions, holds
from mindrlhf.errors import UserError

BASE = ["model.path=m", "data.train_file=p", "data.tokenizer_dir=t", "reward.verifier_function=accuracy_reward"]

RULES = [
    line.split(" | ")
    for line in (Path(__file__).parent / "rules.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.fixture
def empty(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return path


@pytest.mark.parametrize(("broken", "words", "mend", "world_size"), RULES, ids=[rule[0] for rule in RULES])
def test_a_broken_rule_names_the_key_and_the_fix_mends_it(empty, broken, words, mend, world_size):
    overrides = [*BASE, *shlex.split(broken)]
    with pytest.raises(UserError) as failure:
        load_grpo_config(empty, overrides, world_size=int(world_size))
    assert words in str(failure.value) and "\n" not in str(failure.value)
    load_grpo_config(empty, [*overrides, *shlex.split(mend)], world_size=int(world_size))


@pytest.mark.parametrize("task", CONFIGS)
def test_a_changed_key_whose_condition_does_not_hold_is_refused(empty, task):
    """Each key that has a condition, away from its default, where the condition is false and where it is true."""
    base = BASE[: 4 if task == "train" else 3]
    plain = read_config(task, empty, base).config
    types = {name: field for name, field, _ in dotted_keys(CONFIGS[task])}
    checked = 0
    for name, condition in conditions(plain):
        if holds(plain, condition):
            continue
        value = _other_value(types[name])
        reading = read_config(task, empty, [*base, f"{name}={value}"])
        refused = [message for message in reading.mistakes.messages if message.startswith(f"'{name}' is set, but read")]
        assert len(refused) == 1 and condition.partition(".")[0] in refused[0], (name, reading.mistakes.messages)
        fixed = read_config(task, empty, [*base, f"{name}={value}", *_fulfilled(condition)])
        assert not [message for message in fixed.mistakes.messages if f"'{name}' is set, but read" in message], name
        checked += 1
    assert checked >= (40 if task == "train" else 1)


def _other_value(field):
    """Return a value within the bounds of a key that is not its default, as an override has it."""
    metadata, default = field.metadata, field.default
    if default is dataclasses.MISSING:
        return "{a: b}"
    if metadata["choices"]:
        return next(choice for choice in metadata["choices"] if choice != default and (choice,) != default)
    if isinstance(default, bool):
        return str(not default).lower()
    if isinstance(default, (int, float)) or default is None:
        low = metadata["minimum"] or 0
        high = metadata["maximum"] or low + 10
        return next(value for value in (low + 1, (low + high) / 2) if value != default and value <= high)
    return "[3]" if isinstance(default, tuple) else "x"


def _fulfilled(condition):
    """Return overrides that make a condition true."""
    section_key, negation, values = condition.split(" or ")[0].partition("!=")
    if negation:
        return ["correction.mask=token"] if "mask" in section_key else ["correction.weight=token"]
    section_key, _, values = section_key.partition("=")
    plain = {
        "algorithm.beta": "0.1", "data.eval_file": "e", "lora.rank": "8", "tools.agent": "sh a.sh",
        "tools.names": "python", "profiler.steps": "[1]", "reward.model_path": "r", "rollout.segment_tokens": "64",
    }  # fmt: skip
    return [f"{section_key}={values.split('|')[0] or plain.get(section_key, 'true')}"]
