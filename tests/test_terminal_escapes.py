"""Escapes of terminals in data, answers, names of files and what verifiers say are shown, and not obeyed."""

import json
import re
from pathlib import Path

import pytest

from mindrlhf.cli import main
from mindrlhf.system.terminal import visible

CHECKPOINT = str(Path(__file__).parents[1] / "examples" / "quickstart" / "checkpoint")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ESCAPES = [
    *("\x1b[2J", "\x1b]0;PWNED\x07", "\x9b31m", "\u202e", "\x08\x08", "\r", "\x7f", "\u2066", "\x1bc", "\x0c"),
    *("\x1b[31m", "\x1b[1A", "\x1b[6n", "\x1bP1$r\x1b\\", "\x1b]52;c;cHduZWQ=\x07", "\x1b(0", "\x9d0;PWNED\x9c"),
    *("\x07", "\x00", "\x85", "\x0b", "\u202a", "\u2069", "\ud800", "\udcff"),
]


@pytest.mark.parametrize("escape", ESCAPES, ids=ascii)
def test_control_characters_are_spelled_out(escape):
    assert not CONTROL.search(visible(f"a{escape}b")) and visible("a\tb\nü答") == "a\tb\nü答"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def run_command(*words: str) -> str:
        with pytest.raises(SystemExit) if words[0].startswith("tr") else pytest.MonkeyPatch.context():
            main(list(words))
        said = capfd.readouterr()
        assert not CONTROL.search(said.out + said.err), (words, said)
        return said.out + said.err

    return run_command


@pytest.mark.parametrize("escape", ["\x1b]0;PWNED\x07\x1b[2J", "\x9b31m\u202e"], ids=ascii)
def test_commands_show_them(escape, tmp_path, run):
    row = {"question": f"hi {escape}", "answer": f"4{escape}", f"col{escape}": f"left out {escape}", "k": f"v{escape}"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    bad = json.dumps({"question": [f"x{escape}"], "answer": "4"})
    (tmp_path / "bad.jsonl").write_text(f"{bad}\n", encoding="utf-8")
    sample = {"completion": f"7{escape}", "answer": "7", "prompt": f"p{escape}"}
    (tmp_path / "s.jsonl").write_text(json.dumps(sample) + "\n", encoding="utf-8")
    (tmp_path / "v.py").write_text("def v(completion, answer):\n    raise ValueError('no \\ud800' + completion)\n")
    options = ("--tokenizer", CHECKPOINT, "--max-prompt-length", "300", "--handler", "map_keys", "--processes", "1")
    options += ("--map", "question=question,answer=answer", "--output", "o.mindrecord")
    assert "written" in run("data", "build", "--input", "a.jsonl", "--keep", "k", *options)
    assert "PWNED" in run("data", "show", "o.mindrecord", "--tokenizer", CHECKPOINT) or "31m" in escape
    assert "error" in run("data", "build", "--input", "bad.jsonl", *options)
    assert "ValueError" in run("rewards", "score", "--verifier", "v.py:v", "--input", "s.jsonl", "--output", "o.jsonl")
    assert r"no \ud800" in run("rewards", "check", "v.py:v")
    name = f"no{escape}"
    wrong = ["data", "show", name, "--tokenizer", CHECKPOINT], ["config", "check", name], ["weights", "inspect", name]
    assert all("error" in run(*words) for words in (*wrong, [f"tr{escape}ain"]))
