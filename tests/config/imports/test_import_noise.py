"""Any file gives a config or one line that says why not: noise, damaged scripts, random values for every key."""

import os
import random

import pytest
import yaml

from mindrlhf.config.imports.convert import STACKS, convert
from mindrlhf.errors import UserError
from tests.config.imports.test_config_imports import EXAMPLES
from tests.config.imports.test_counterparts import PROBES

PIECES = (
    "if", "then", "fi", "case", "esac", "in", "for", "do", "done", "{", "}", "(", ")", "((", "))", "[[", "]]", "[", "]",
    "&&", "||", "|", ";", ";;", "\n", "$(", "${", "`", "'", '"', "\\", "$X", "${X:-", "X=", "X+=(", "#", "<<EOF", "EOF",
    "--lr", "=", "actor_rollout_ref.model.path=", "1e-6", "*", "$((1+", "eval", "bash -c", "f()", "f", "exit 1", "!",
    "~", "@", "${!X}", "${#X[@]}", "$'", "é", "\t", "\0", "\ue000", "\ue002", "set --", "shift", "read X", "local",
)  # fmt: skip
STRANGE = (
    *PROBES, None, "", "${", "${a", "${a.b}", "${.}", "${..x}", "${oc.env:A,${oc.env:B}}", "$", -1, 10**30, -(10**400),
    float("nan"), float("inf"), "1e999", [], {}, [[]], [None], {"": None}, {1: 2}, "a\nb # c", "\x1b", "²", "é" * 300,
)  # fmt: skip
ROUNDS = 400 if os.environ.get("MINDRLHF_SLOW_TESTS") else 16  # files of each kind


def told(path, stack):
    """Convert; True where there is a config, else there was one line."""
    try:
        text, result = convert(stack, path)
    except UserError as error:
        assert str(error) and "\n" not in str(error).strip() and str(path) in str(error)
        return False
    content = yaml.safe_load(text)
    assert isinstance(content, dict) and all(isinstance(section, dict) for section in content.values())
    assert content.keys() >= {"model", "data"}
    values = {f"{section}.{key}" for section, keys in content.items() for key in keys}
    assert values == {key for key, value in result.values.items() if value is not None}
    return True


def noise(rng):
    kind = rng.randrange(3)
    if kind == 0:
        return rng.randbytes(rng.randint(0, 200))
    if kind == 1:
        return "".join(map(chr, rng.choices(range(1, 0x250), k=rng.randint(0, 200)))).encode()
    return rng.choice(("", " ")).join(rng.choices(PIECES, k=rng.randint(1, 40))).encode("utf-8", "replace")


def damaged(rng, text):
    """A file with pieces put in, taken out or doubled."""
    for _ in range(rng.randint(1, 6)):
        at, length = rng.randrange(len(text) + 1), rng.choice((0, 1, 5, 80))
        text = text[:at] + rng.choice((*PIECES, text[at : at + length] * 2, "")) + text[at + length :]
    return text.encode("utf-8", "replace")


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("suffix", [".sh", ".yaml", ".py", ""])
def test_noise_and_damage_give_a_config_or_a_line(tmp_path, stack, suffix):
    rng, configs = random.Random(f"{stack}{suffix}"), 0
    example = EXAMPLES[stack].read_text()
    if suffix == ".py":
        example = "args = GRPOConfig(learning_rate=1e-6, output_dir=out, **rest)\nx = LoraConfig(r=8)\n" * 3
    elif EXAMPLES[stack].suffix != ".sh" and suffix == ".sh":
        example = (
            "N=${N:-8}\nA=(a.b=$N trainer.total_epochs=2)\nx algorithm.adv_estimator=grpo ${A[@]} --lr $(date) -- $1\n"
        )
    for _ in range(ROUNDS):
        path = tmp_path / f"theirs{suffix}"
        path.write_bytes(noise(rng) if rng.random() < 0.4 else damaged(rng, example))
        configs += told(path, stack)
    print(f"{stack}{suffix}: {ROUNDS} files, {configs} of them configs")


@pytest.mark.parametrize("stack", STACKS)
def test_any_value_of_any_key_gives_a_config(tmp_path, stack):
    rng, module = random.Random(stack), STACKS[stack]
    names = [name for name in module.RULES if "*" not in name] + ["made.up", "made_up"]
    configs = 0
    for _ in range(ROUNDS):
        chosen = {name: rng.choice(STRANGE) for name in rng.sample(names, min(len(names), rng.randint(1, 60)))}
        nested = {}
        for name, value in chosen.items():
            place = nested
            *sections, last = name.split(".")
            for section in sections:
                place = place.setdefault(section, {})
                place = place if isinstance(place, dict) else {}
            place[last] = value
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(nested if rng.random() < 0.8 else chosen, allow_unicode=True))
        configs += told(path, stack)
    print(f"{stack}: {ROUNDS} files of random values, {configs} of them configs")
    assert configs > ROUNDS / 2


@pytest.mark.parametrize(
    "text",
    [
        "&a {b: *a}",
        "a: &a [*a]\nalgorithm: {adv_estimator: *a}",
        "? [1, 2]\n: 3\n",
        "a: 2001-99-99",
        "x: !!python/object:a.b {}",
    ]
    + [
        "{a: " * 200 + "1" + "}" * 200,
        "[" * 5000,
        "a: 1\na: 2",
        "- 1",
        "text",
        "1: {2: 3}",
        "null",
        "\ufeffalgorithm: {gamma: 1}",
    ],
)
def test_strange_yaml_gives_a_config_or_a_line(tmp_path, text):
    path = tmp_path / "theirs.yaml"
    path.write_text(text, encoding="utf-8")
    told(path, "verl")


def test_aliases_that_multiply_end_in_time(tmp_path):
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}, m: *a{n - 1}}}" for n in range(1, 25)]
    path = tmp_path / "theirs.yaml"
    path.write_text("\n".join([*lines, "algorithm: {gamma: 1.0}"]))
    told(path, "verl")


def test_files_that_are_none(tmp_path):
    for path in (tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(UserError, match="cannot be read"):
            convert("verl", path)
    (tmp_path / "large.sh").write_text("#" * (1 << 21))
    with pytest.raises(UserError, match="at most"):
        convert("verl", tmp_path / "large.sh")
