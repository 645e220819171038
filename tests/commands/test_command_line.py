"""What every command has in common: one vocabulary, old names, pipes, completion."""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mindrlhf
from mindrlhf.cli import LEAST, _parse, build_parser, main
from mindrlhf.commands.vocabulary import OVERRIDES_HELP


def all_parsers(parser, path=()):
    yield " ".join(path), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from all_parsers(child, (*path, name))


PARSERS = dict(all_parsers(build_parser()))


def shown_options(parser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


def test_workers_of_a_plan_are_those_of_all_nodes(capsys):
    config = "examples/grpo/qwen2_5_7b_16npu_32k.yaml"
    assert main(["plan", config, "--workers", "16"]) == 0
    printed = capsys.readouterr().out
    assert "16 devices" in printed and "2 nodes" in printed, printed


@pytest.mark.parametrize("option", sorted(LEAST))
def test_a_count_below_the_least_is_one_line_of_every_command(option, capsys):
    def takes(parser) -> bool:
        return any(action.type is int and option in action.option_strings for action in parser._actions)

    paths = [path for path, parser in PARSERS.items() if takes(parser)]
    assert paths
    for path in paths:
        assert main([*path.split(), f"{option}={LEAST[option] - 1}"]) == 2
        assert f"error: {option} is {LEAST[option] - 1}: give {LEAST[option]} or more" in capsys.readouterr().err


def test_every_command_with_overrides_explains_them():
    for path, parser in PARSERS.items():
        has_overrides = any(action.dest == "overrides" for action in parser._actions)
        assert (parser.epilog == OVERRIDES_HELP) == has_overrides, path


def test_commands_that_take_long_say_so_without_a_terminal():
    silent = {path for path in PARSERS if path.startswith(("weights ", "strategy", "plan", "data build", "rewards a"))}
    silent |= {"eval", "rewards score", "rewards check"}  # "view" does where it does not serve
    assert {path: PARSERS[path].get_default("says") for path in silent if not PARSERS[path].get_default("says")} == {}
    assert len(silent) > 15


def test_a_dash_is_standard_output(tmp_path, capsys):
    sample = {"step": 1, "prompt": "1+1?", "completion": "2", "answer": "2", "reward": 1.0, "rewards": {"a": 1.0}}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample | {"finish_reason": "stop"}) + "\n")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": {n / 7}}}\n' for n in (1, 2, 3)))
    before = sorted(tmp_path.iterdir())
    for words, start in (
        (["view", str(tmp_path), "--output", "-"], "<!doctype html>"),
        (["report", str(tmp_path), "--output", "-"], "<!doctype html>"),
        (["report", str(tmp_path), "--svg", "-"], "<svg "),
    ):
        assert main(words) == 0
        assert capsys.readouterr().out.lower().startswith(start), words
    assert sorted(tmp_path.iterdir()) == before


def test_overrides_may_stand_anywhere():
    arguments = _parse(["train", "c.yaml", "a.b=1", "--workers", "2", "c.d=2"])
    assert (arguments.config, arguments.workers, arguments.overrides) == ("c.yaml", 2, ["a.b=1", "c.d=2"])


def test_a_reader_that_leaves_is_no_error(monkeypatch, capsys):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["rewards", "list"]) == 141
    assert capsys.readouterr().err == ""


def test_the_output_of_a_process_can_be_cut_off():
    """`mindrlhf config docs | head -1`: the rest does not fit the pipe."""
    with subprocess.Popen(
        [sys.executable, "-m", "mindrlhf.cli", "config", "docs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        assert process.stderr.read() == b""


FIRST_LINE = """
import io, sys

class Terminal(io.StringIO):
    def write(self, text):
        if text.strip():
            print(text.strip(), *sys.modules, sep="\\n", file=sys.__stdout__, flush=True)
            raise SystemExit(0)

from mindrlhf.cli import main
sys.stdout = Terminal()
main(["train", "no_such.yaml", "run.max_steps=3", "--workers", "2"])
"""


def test_train_speaks_before_it_loads_anything_that_takes_time():
    """The first line is there within a second on a slow disk too: it waits for the standard library alone."""
    ended = subprocess.run([sys.executable, "-c", FIRST_LINE], capture_output=True, text=True, timeout=120)
    first, *loaded = ended.stdout.splitlines()
    assert first == "mindrlhf: checking no_such.yaml", ended.stderr
    foreign = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"mindrlhf", "__main__"}
    installed = {name for name in foreign if not name.startswith(("_", "sitecustomize", "usercustomize", "google"))}
    assert installed == set()
    packages = {name.split(".")[1] for name in loaded if name.startswith("mindrlhf.")}
    light = {"cli", "commands", "doctor", "errors", "launch", "system", "config", "hub"}
    assert "commands" in packages and packages <= light


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["weigh"], ["weights"]),
        (["weights", "me"], ["merge-adapter", "merge"]),
        (["train", "c.yaml", "--max-r"], ["--max-restarts"]),
        (["train", "c.yaml", "run.max_s"], ["run.max_steps="]),
        (["dpo", "c.yaml", "dpo.be"], ["dpo.beta="]),
        (["train", "c.yaml", "algorithm.name", "=", "gs"], ["gspo"]),
        (["train", "c.yaml", "lora.rank=4", "run.device", "="], ["cpu", "ascend"]),
        (["plan", "c.yaml", "--device", "A"], ["A2", "A3"]),
        (["data", "build", "--handler", "map"], ["map_keys"]),
        (["data", "build", "--template", "r"], ["r1"]),
        (["rewards", "score", "--verifier", "accuracy"], ["accuracy_reward"]),
        (["rewards", "show", "accuracy"], ["accuracy_reward"]),
        (["train", "c.yaml", "reward.verifier_function", "=", "accuracy"], ["accuracy_reward"]),
        (["train", "c.yaml", "tools.names", "="], ["python"]),
    ],
)
def test_bash_completes(words, expected, capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = " ".join(("mindrlhf", *words)).replace(" = ", "=").replace(" =", "=")
    script += f'COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_WORDBREAKS=" ="; COMP_CWORD={len(words)}'
    script += f'; COMP_WORDS=(mindrlhf {" ".join(words)}); _mindrlhf; echo "${{COMPREPLY[@]}}"'
    finished = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout.split() == expected


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "--spares is 1, but --max-restarts is 0"),
        (
            ("--max-restarts", "2", "checkpoint.node_local=true", "checkpoint.save_dir=somewhere"),
            "--spares is 1, but with checkpoint.node_local a spare has no checkpoint on its disk",
        ),
    ],
)
def test_spares_that_could_not_help_are_refused(words, message, capsys):
    place = ("--nodes", "2", "--spares", "1", "--node-rank", "2", "--master", "127.0.0.1:8118")
    assert main(["train", "examples/sanity/config.yaml", *place, *words]) == 2
    assert message in capsys.readouterr().err


def numeric_options() -> list[tuple[str, str, str]]:
    found = [
        (path, action.option_strings[0], "int" if action.type is int else "float")
        for path, parser in PARSERS.items()
        for action in parser._actions
        if action.type in (int, float) and action.option_strings
    ]
    assert len(found) > 25
    return found


@pytest.mark.parametrize("path, option, kind", numeric_options())
def test_no_option_takes_a_number_that_nobody_means(path, option, kind, capsys):
    huge = ["1" + 30 * "0", "-" + 30 * "9", "9" * 5000, "2147483648" if kind == "int" else "1.1e9"]
    for value in (*huge, *(["1e400", "nan", "-inf"] if kind == "float" else [])):
        with pytest.raises(SystemExit) as ended:
            PARSERS[path].parse_args([f"{option}={value}"])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"argument {option}" in line and len(line) < 5300


NAMED = re.compile(r"mindrlhf ([a-z][\w-]*)((?: [a-z][\w-]*)?)((?:[^'`\n;.]*? --[a-z-]+)*)")


def literals() -> Iterator[tuple[Path, str]]:
    """Every text in the sources; what a format puts in is an ellipsis."""
    for path in sorted(Path(mindrlhf.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else "\u2026" for one in node.values)
                yield path, "".join(parts)


def unknown_commands(text: str) -> list[str]:
    """Return those of the commands in quotes or after a colon that do not exist, or not with their options."""
    found = []
    for quoted in re.findall(r"['`]mindrlhf [^'`]*['`]|: mindrlhf .*", text):
        match = NAMED.search(quoted)
        if match is None or match[1] == "\u2026":
            continue
        path = match[1] + match[2] if match[1] + match[2] in PARSERS else match[1]
        if path not in PARSERS or (PARSERS[path]._subparsers and match[2]):
            found.append(quoted)
            continue
        options = re.findall(r" (--[a-z][\w-]*)", match[3])
        known = {
            option for name, parser in PARSERS.items() if name.startswith(path) for option in shown_options(parser)
        }
        found += [f"{quoted}: {option}" for option in options if option not in known]
    return found


def test_every_command_that_a_message_names_exists():
    texts = list(literals())
    assert [(path.name, one) for path, text in texts for one in unknown_commands(text)] == []
    assert sum("mindrlhf " in text and bool(NAMED.search(text)) for _, text in texts) > 60
    assert unknown_commands("'mindrlhf rewards lint' tries it") and unknown_commands("see `mindrlhf trian`")
    assert unknown_commands("'mindrlhf data build --kept x'") and not unknown_commands("'mindrlhf data build --keep x'")
