"""Any file gives a config or one line that says why not: damaged files, random values for every key."""

import os
import random

import pytest
import yaml

from mindrlhf.commands.launch_script import commands_of
from mindrlhf.config.imports.convert import STACKS, convert
from mindrlhf.errors import UserError
from tests.config.imports.test_config_imports import EXAMPLES

PIECES = (
    "{", "}", "[", "]", "|", "\n", "${", "'", '"', "\\", "#", "1e-6", "*", "&a", "!", "~", "@", ": ", "- ",
    "é", "\t", "\0",
)  # fmt: skip
STRANGE = (
    True, False, 0, 1, 8, 0.5, "x", "full", "gae", "grpo", "cosine", "R3", "bf16", "token", "steps", [0.1, 0.9],
    {"a": "b"}, None, "", "${", "${a.b}", "$(a)", "$", -1, 10**30, -(10**400), float("nan"), float("inf"), "1e999", [],
    {}, [[]], [None], {"": None}, {1: 2}, "a\nb # c", "\x1b", "²", "é" * 300,
)  # fmt: skip
ROUNDS = 400 if os.environ.get("MINDRLHF_SLOW_TESTS") else 16  # files of each kind


def told(path, stack):
    """Convert; True where there is a config, else there was one line."""
    try:
        text, result = convert(stack, path, run_script=commands_of)
    except UserError as error:
        assert str(error) and "\n" not in str(error).strip() and str(path) in str(error)
        return False
    content = yaml.safe_load(text)
    assert isinstance(content, dict) and all(isinstance(section, dict) for section in content.values())
    assert content.keys() >= {"model", "data"}
    values = {f"{section}.{key}" for section, keys in content.items() for key in keys}
    assert values == {".".join(key.split(".")[:2]) for key, value in result.values.items() if value is not None}
    return True


def damaged(rng, text):
    """A file with pieces put in, taken out or doubled."""
    for _ in range(rng.randint(1, 6)):
        at, length = rng.randrange(len(text) + 1), rng.choice((0, 1, 5, 80))
        text = text[:at] + rng.choice((*PIECES, text[at : at + length] * 2, "")) + text[at + length :]
    return text.encode("utf-8", "replace")


@pytest.mark.parametrize("stack", STACKS)
def test_damage_gives_a_config_or_a_line(tmp_path, stack):
    rng, path = random.Random(stack), tmp_path / "theirs.yaml"
    for _ in range(ROUNDS):
        path.write_bytes(damaged(rng, EXAMPLES[stack].read_text()))
        told(path, stack)


@pytest.mark.parametrize("stack", STACKS)
def test_any_value_of_any_key_gives_a_config(tmp_path, stack):
    rng, path = random.Random(stack), tmp_path / "theirs.yaml"
    names = [name for name in STACKS[stack].TABLE if "*" not in name] + ["made.up", "made_up"]
    configs = 0
    for _ in range(ROUNDS):
        chosen = {name: rng.choice(STRANGE) for name in rng.sample(names, rng.randint(1, min(len(names), 60)))}
        path.write_text(yaml.safe_dump(chosen, allow_unicode=True))
        configs += told(path, stack)
    assert configs > ROUNDS / 2


@pytest.mark.parametrize(
    "text",
    [
        "&a {b: *a}",
        "a: &a [*a]\nalgorithm: {adv_estimator: *a}",
        "? [1, 2]\n: 3\n",
        "a: 2001-99-99",
        "x: !!python/object:a.b {}",
        "{a: " * 200 + "1" + "}" * 200,
        "[" * 5000,
        "a: 1\na: 2",
        "1: {2: 3}",
        "null",
        "\ufeffalgorithm: {gamma: 1}",
    ],
)
def test_strange_yaml_gives_a_config_or_a_line(tmp_path, text):
    path = tmp_path / "theirs.yaml"
    path.write_text(text, encoding="utf-8")
    told(path, "verl")
