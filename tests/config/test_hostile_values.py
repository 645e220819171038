"""Files and values that nobody means: each gives one line, or a config whose numbers can be computed with."""

import dataclasses
import json
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf import cli
from mindrlhf.config.keys import MAX_INTEGER, MAX_NUMBER, MAX_SECONDS, MIN_NUMBER
from mindrlhf.config.load import CONFIGS, read_content
from mindrlhf.config.parse import dotted_keys, read_yaml
from mindrlhf.errors import UserError
from mindrlhf.system.strict_yaml import load_yaml

REQUIRED = {
    "train": {"model": {"path": "m"}, "data": {"train_file": "t", "tokenizer_dir": "k"}},
    "sft": {"model": {"path": "m"}, "data": {"train_file": "t", "tokenizer_dir": "k"}},
    "dpo": {"model": {"path": "m"}, "data": {"train_file": "t", "tokenizer_dir": "k"}},
    "reward-model": {"model": {"path": "m"}, "data": {"train_file": "t", "tokenizer_dir": "k"}},
}
REQUIRED["train"]["reward"] = {"verifier_function": "accuracy_reward"}
# Each key once, with the first kind of run that has it.
KEYS = {name: task for task in reversed(CONFIGS) for name, _, _ in dotted_keys(CONFIGS[task])}
NUMBERS = [
    *("0", "-0", "-0.0", "1", "+1", "-1", "2", "7", "1_000", "0x10", "0b11", "010", "1.5", "1e-6", ".5", "1.", "1e0"),
    *("1e400", "-1e400", ".inf", "-.inf", "+.inf", ".nan", "inf", "nan", "-nan", "Infinity", "1e30", "-1e30", "1e308"),
    *("1e-320", "-5e-324", "1e-31", "9" * 30, "-" + "9" * 30, "9" * 400, "9" * 4299, "9" * 5000, "0x" + "f" * 5000),
    *("2147483647", "2147483648", "-2147483649", "4294967296", "9223372036854775807", "9223372036854775808", "1e9"),
    *("1000000001", "2000000", "2000001", "12:30", "1:59:59.5", "190:20:30"),
]
OTHERS = [
    *("", "null", "~", "true", "yes", "[]", "[[1]]", "[1, [2]]", "{}", "{a: 1}", "2020-01-01", "2020-99-99", "''"),
    *("' '", "a,b", "1,2", "1,,2", "[.inf]", "[1e400, 1]", "[null]", "!!binary AA==", "!!set {a}", "!!omap [a: 1]"),
    *("&a [*a]", "!!int x", "'\\0'", "\udc80", "x" * 5000, "[" * 60, "*a"),
]


def read(task: str, overrides: list[str]) -> None:
    """Read a config with such values, and look whether it is sound or refused in words."""
    reading = read_content(task, REQUIRED[task], overrides)
    for message in reading.mistakes.messages:
        assert message.strip() and "\n" not in message and len(message) < 1000, message[:2000]
    if reading.mistakes.messages:
        return
    for name, _, _ in dotted_keys(CONFIGS[task]):
        section, _, key = name.partition(".")
        value = getattr(getattr(reading.config, section), key)
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            assert math.isfinite(number) and (number == 0 or abs(number) >= MIN_NUMBER), (name, number)
            most = MAX_INTEGER if isinstance(number, int) else MAX_SECONDS if name.endswith("_s") else MAX_NUMBER
            assert abs(number) <= most, (name, number)
    # What a run writes down is what it reads again.
    again = read_content(task, json.loads(json.dumps(dataclasses.asdict(reading.config))))
    assert again.config == reading.config and not again.mistakes.messages


def values_for(place: int) -> list[str]:
    """The worst numbers, and of all values five others for each key; the neighbours of a key get the rest."""
    pool = [*NUMBERS, *OTHERS]
    return ["1e400", "-1e30", ".nan", "9" * 400, "1e-320", *(pool[(5 * place + i) % len(pool)] for i in range(5))]


@pytest.mark.parametrize("place, name", list(enumerate(KEYS)))
def test_every_key_takes_or_refuses_numbers_and_everything_else_in_words(place, name):
    for value in values_for(place):
        read(KEYS[name], [f"{name}={value}"])


@settings(max_examples=20)
@given(st.data())
def test_so_do_several_keys_together(data):
    task = data.draw(st.sampled_from(sorted(CONFIGS)))
    names = data.draw(st.lists(st.sampled_from([name for name, _, _ in dotted_keys(CONFIGS[task])]), max_size=6))
    value = st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(OTHERS),
        st.floats().map(repr),
        st.integers().map(str),
        st.text(max_size=20),
    )
    read(task, [f"{name}={data.draw(value)}" for name in names])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.max_steps=1.0e+30", "'run.max_steps' is 1e+30, but must be a number from 0 to 2147483647"),
        ("run.max_steps=1" + 30 * "0", f"'run.max_steps' is 1{30 * '0'}, but must be a number from 0"),
        ("optimizer.start_lr=1e400", "'optimizer.start_lr' is inf, but must be a number from 0 to 1000000000"),
        ("reward.failure_value=.nan", "'reward.failure_value' is nan, but must be a number from -1000000000 to"),
        ("run.hang_timeout_s=1e18", "'run.hang_timeout_s' is 1e+18, but must be a number from 0 to 2000000"),
        ("rollout.temperature=1e-320", "'rollout.temperature' is 1e-320, but numbers other than 0 must be 1e-30"),
        ("run.max_steps=0100", "override 'run.max_steps=0100': 0100 (line 1) is 64 in YAML 1.1 and 100 in"),
        ("run.max_steps=12:30", "'run.max_steps' must be an integer, not '12:30'"),
    ],
)
def test_a_number_that_nobody_means_is_named_with_the_bounds(override, message):
    (found,) = read_content("train", REQUIRED["train"], [override]).mistakes.messages
    assert found.startswith(message)


def test_a_time_of_day_in_a_text_stays_one():
    config = read_content("train", REQUIRED["train"], ["rollout.env={START: 12:30, PORTS: 80:22}"]).config
    assert config.rollout.env == {"START": "12:30", "PORTS": "80:22"}


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(15)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS + "reward: {verifier_function: *p}\n",
        LAUGHS + "rollout: {env: {x: *p}}\n",
        LAUGHS + "run: *p\n",
        "run: &r {name: *r, <<: {a: 1}}\n",
        "reward: &a {verifier_function: *a, options: {x: *a}}\n",
    ],
)
def test_a_file_that_stands_for_more_than_anybody_writes_is_refused_in_lines(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    try:
        messages = read_content("train", {**REQUIRED["train"], **read_yaml(path)}).mistakes.messages
    except UserError as error:
        messages = [str(error)]
    assert messages and max(map(len, messages)) < 1000 and not any("\n" in message for message in messages)


def test_aliases_that_anybody_writes_are_read():
    text = "base: &base {a: [1, 2], b: &b x}\none: *base\nother: {<<: *base, b: *b, c: [*base, *base]}\n"
    assert load_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize("words", [["{}"], ["examples/sanity/config.yaml", "data.train_file={}"]])
@pytest.mark.parametrize("path", ["a" * 5000, "a" * 256, "a/" * 2500])
def test_a_path_that_no_file_system_takes_is_one_line(words, path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_drop_output", lambda: None)  # pytest's own
    assert cli.main(["config", "check", *(word.format(path) for word in words)]) == UserError.exit_code
    assert path[:60] in (said := capsys.readouterr().err) and len(max(said.splitlines(), key=len)) < 6000
