"""What a message proposes: by meaning before spelling, with words of the command line, and nothing left on the disk."""

import argparse
import json
import os
import stat
import subprocess
import venv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.cli import build_parser, main
from mindrlhf.config.keys import nearest_choice
from mindrlhf.config.load import CONFIGS
from mindrlhf.config.parse import dotted_keys, read
from mindrlhf.errors import UserError
from mindrlhf.hub.cache import no_directory
from mindrlhf.rollout.vllm_options import check_positions
from mindrlhf.system.files import write_file
from mindrlhf.system.sizes import parse_size

CHOICES = {field.metadata["choices"] for cls in CONFIGS.values() for _, field, _ in dotted_keys(cls)} - {()}
TEXT_CHOICES = sorted({one for one in CHOICES if all(isinstance(value, str) for value in one)})


@pytest.mark.parametrize(
    ("value", "choices", "meant"),
    [
        ("npu", ("cpu", "ascend"), "ascend"),
        ("NPU", ("cpu", "ascend"), "ascend"),
        ("Ascend910B", ("cpu", "ascend"), "ascend"),
        ("CPU", ("cpu", "ascend"), "cpu"),
        ("GRPO", ("grpo", "ppo", "dr_grpo"), "grpo"),
        ("Dr. GRPO", ("grpo", "ppo", "dr_grpo"), "dr_grpo"),
        ("dr-grpo", ("grpo", "ppo", "dr_grpo"), "dr_grpo"),
        ("REINFORCE++", ("reinforce_pp", "reinforce_pp_baseline"), "reinforce_pp"),
        ("bf16", ("float32", "bfloat16"), "bfloat16"),
        ("fp32", ("float32", "bfloat16"), "float32"),
        ("fp16", ("float32", "bfloat16"), None),
        ("gropo", ("grpo", "ppo", "dr_grpo"), "grpo"),
        ("x" * 10**6, ("grpo",), None),
    ],
)
def test_a_choice_is_meant_by_meaning_first(value, choices, meant):
    assert nearest_choice(value, choices) == meant


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("cuda", "; no trainer runs on a GPU"),
        ("CUDA:0", "; no trainer runs on a GPU"),
        ("gpu", "; no trainer runs on a GPU"),
        ("npu", "; did you mean 'ascend'?"),
        ("quantum", ""),
    ],
)
def test_a_device_that_is_not_there_says_what_is(value, hint):
    config = read(CONFIGS["train"], {"run": {"device": value}})
    assert f"'run.device' is {value!r}, but must be one of cpu, ascend{hint}" in config.mistakes.messages


@given(st.data())
def test_case_hyphens_and_spaces_never_hide_a_choice(data):
    choices = data.draw(st.sampled_from(TEXT_CHOICES))
    choice = data.draw(st.sampled_from(choices))
    written = data.draw(st.sampled_from([choice.upper(), choice.title(), choice.replace("_", "-"), f" {choice} "]))
    found = nearest_choice(written, choices)
    alike = [one for one in choices if one.lower().replace("_", "") == choice.lower().replace("_", "")]
    assert found in alike


@pytest.mark.parametrize("text", ["64", "1000", " 80 "])
def test_a_size_without_unit_is_not_taken_for_bytes(text):
    with pytest.raises(UserError, match=f"{int(text):,} bytes: write a number and a unit"):
        parse_size(text, "--device-memory")


def test_messages_say_what_stands_there(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert "is a file: give a Hugging Face model directory" in no_directory(str(tmp_path / "file"))
    assert "does not exist: give" in no_directory(str(tmp_path / "none"))
    assert main(["config", "check", str(tmp_path)]) == 2
    assert "is a directory: name the YAML file in it" in capsys.readouterr().err
    (tmp_path / "tab.yaml").write_text("run:\n\tseed: 1\n")
    assert main(["config", "check", str(tmp_path / "tab.yaml"), "run.seed", "=", "1"]) == 2
    assert "line 2, column 1: indent with spaces" in capsys.readouterr().err


def test_an_interpreter_that_lacks_a_package_is_named(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    words = [python, "-m", "mindrlhf", "train", "examples/quickstart/config.yaml"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{python} has no numpy: use .venv/bin/mindrlhf" in done.stderr
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    with pytest.raises(UserError, match="rollout.max_response_length, 'data build --max-prompt-length'"):
        check_positions(str(tmp_path), 2048)


def test_a_config_for_cpus_is_planned_as_it_is_trained(capsys):
    assert main(["plan", "examples/quickstart/config.yaml", "--workers", "2"]) == 0
    assert "FITS: " in capsys.readouterr().out


def test_an_output_directory_that_is_a_file_is_a_mistake_of_the_config(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["config", "check", "examples/sanity/config.yaml", f"run.output_dir={tmp_path / 'file'}"]) == 2
    err = capsys.readouterr().err
    assert err.count("is a file: choose another directory") == 1 and "error: 'run.output_dir' is" in err


def test_a_user_function_is_not_given_made_up_tokens(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def brief(completion, answer, *, num_tokens):\n    return 1 / num_tokens\n")
    (tmp_path / "s.jsonl").write_text('{"completion": "x", "answer": "y"}\n')
    words = ["rewards", "score", "--verifier", f"{tmp_path}/mine.py:brief", "--input", str(tmp_path / "s.jsonl")]
    assert main(words) == 2
    assert "there is no field 'num_tokens'" in capsys.readouterr().err


def test_a_check_leaves_nothing_on_the_disk(tmp_path, monkeypatch, capsys):
    for words in (
        ["config", "check", f"{os.getcwd()}/examples/sanity/config.yaml", "run.output_dir=typo"],
        ["eval", f"{os.getcwd()}/examples/sanity/config.yaml", "--model", "nowhere", "run.output_dir=typo"],
        ["train", f"{os.getcwd()}/examples/sanity/config.yaml", "run.output_dir=typo"],
        ["config", "new", "--model", "nowhere", "--npus", "-1"],
        ["report", "typo"],
    ):
        monkeypatch.chdir(tmp_path)
        assert main(words) in (1, 2), words
        assert list(tmp_path.iterdir()) == [], words


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "hello")
    assert os.read(reader, 10) == b"hello"
    os.close(reader)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode) and len(list(tmp_path.iterdir())) == 1


FULL = [
    ["rewards", "score", "--verifier", "format_reward", "--input", "{samples}", "--output", "{full}"],
    ["report", "{run}", "--output", "{full}"],
    ["report", "{run}", "--svg", "{full}"],
    ["view", "{run}", "--output", "{full}"],
    ["plan", "examples/grpo/qwen2_5_7b_8npu.yaml", "--workers", "8", "--json", "{full}"],
    ["config", "import", "--from", "trl", "tests/config/imports/trl.yaml", "--output", "{full}"],
]


@pytest.mark.parametrize("words", FULL, ids=lambda words: " ".join(words[:2] + words[-2:-1]))
def test_a_full_disk_and_a_directory_are_one_line(words, tmp_path, capsys):
    sample = {"step": 1, "prompt": "1+1?", "completion": "2", "answer": "2", "reward": 1.0, "rewards": {"a": 1.0}}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample | {"finish_reason": "stop"}) + "\n")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": {n / 7}}}\n' for n in (1, 2, 3)))
    full, taken = tmp_path / "full", tmp_path / "taken"
    taken.mkdir()
    words = [word.format(samples=tmp_path / "samples.jsonl", run=tmp_path, full="{full}") for word in words]
    assert main([word.format(full=taken) for word in words]) == 2
    assert " a directory" in capsys.readouterr().err.splitlines()[-1]
    try:
        os.mknod(full, stat.S_IFCHR | 0o666, os.makedev(1, 7))  # null(4): writing to it fails with ENOSPC
    except OSError:
        pytest.skip("devices cannot be made here")
    assert main([word.format(full=full) for word in words]) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1 and "No space left on device" in errors[0] and "Traceback" not in errors[0]
    assert stat.S_ISCHR(os.stat(full).st_mode)


def leaves(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()):
    children = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not children:
        yield path, parser
    for action in children:
        for name, child in action.choices.items():
            yield from leaves(child, (*path, name))


LEAVES = dict(leaves(build_parser()))
OPTIONS = [
    (path, action)
    for path, parser in LEAVES.items()
    for action in parser._actions
    if action.option_strings and action.nargs != 0 and action.option_strings[0] not in ("-h", "--help")
]
VALUES = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from(
        ["", " ", "-", "0", "-1", "1e309", "nan", "00", "0x10", "1_000", "a=b", "=", "/dev/null", "\u22121"]
    ),
    st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12),
).map(str)


@given(st.sampled_from(OPTIONS), VALUES)
def test_no_value_of_any_option_gives_a_traceback(option, value):
    """A command with one option and nothing else: parsed, or refused in one line; nothing runs."""
    path, action = option
    parser = build_parser()
    chosen = parser
    for name in path:
        chosen = next(a for a in chosen._actions if isinstance(a, argparse._SubParsersAction)).choices[name]
    for other in chosen._actions:
        other.required = False
        if not other.option_strings:
            other.nargs = "*"
    chosen.set_defaults(run=lambda arguments: 0, says=None)
    words = [*path, f"{action.option_strings[0]}={value}"]
    import mindrlhf.cli as cli

    original, cli.build_parser = cli.build_parser, lambda: parser
    try:
        assert main(words) in (0, 2)
    except SystemExit as end:
        assert end.code in (0, 2)
    finally:
        cli.build_parser = original
