"""``mindrlhf data``: flags reach the builder, and show prints what is in the file."""

import argparse
import json

import numpy as np
import pytest
import tokenizers as hf
from PIL import Image
from tiny_vl import write_tiny_vl

from mindrlhf.cli import main
from mindrlhf.commands import data
from mindrlhf.errors import UserError


@pytest.fixture
def run():
    parser = argparse.ArgumentParser()
    data.register(parser.add_subparsers(required=True))

    def run_arguments(*argv):
        arguments = parser.parse_args([str(argument) for argument in argv])
        return arguments.run(arguments)

    return run_arguments


@pytest.fixture
def tokenizer_directory(tmp_path):
    vocab = {"<eos>": 0, "what": 1, "is": 2, "six": 3, "seven": 4, "times": 5, "?": 6, "because": 7, "a": 8}
    backend = hf.Tokenizer(hf.models.WordLevel(vocab))
    backend.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return tmp_path


def test_build_and_show(run, tokenizer_directory, tmp_path, capsys):
    rows = [
        {"q": "what is six times seven ?", "a": 42, "r": "because six"},
        {"q": "what is six times seven ? " * 3, "a": 42, "r": "because"},
        {"a": 1},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    output = tmp_path / "o.mindrecord"
    common = ["--output", output, "--tokenizer", tokenizer_directory, "--handler", "map_keys", "--template", "plain"]
    flags = ["--task", "sft", "--max-prompt-length", 10, "--max-length", 12, "--processes", 1, "--skip-bad"]
    key_map = ["--map", "question=q,answer=a,response=r"]
    assert run("data", "build", "--input", tmp_path / "a.json", *common, *key_map, *flags) == 0
    printed = capsys.readouterr().out
    assert "1 kept of 3 read (1 too long, 1 bad)" in printed
    assert "a.json:1: no field 'q'" in printed
    assert "prompt len 0% 6, 25% 6, 50% 6, 75% 6, 95% 6, 100% 6 tokens" in printed
    assert "response len 0% 3, 25% 3" in printed
    assert "begin      no token: the tokenizer has none" in printed

    assert run("data", "show", output, "--tokenizer", tokenizer_directory) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "handler                map_keys" in lines
    assert "--- a.json:1" in lines
    assert "answer    42" in lines
    assert lines[lines.index("prompt    6 tokens") + 1] == "what is six times seven ?"
    assert lines[lines.index("response  3 tokens") + 1] == "because six <eos>"

    assert run("data", "show", output, "--num", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("prompt    6 tokens") + 1] == "1 2 3 5 4 6"


def test_what_a_terminal_would_obey_is_spelled_out(run, tokenizer_directory, tmp_path, capsys):
    evil, shown = "\x1b]0;evil\x07\x9b2J\r\u202e", "\\x1b]0;evil\\x07\\x9b2J\\r\\u202e"
    rows = [{"q": "what is", "a": f"4{evil}", f"unread{evil}": 1, "k": evil}, {f"q{evil}": "six"}, {"q": 1, evil: 2}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "o.mindrecord"
    words = ["--input", tmp_path / "a.jsonl", "--output", output, "--tokenizer", tokenizer_directory, "--keep", "k"]
    words += ["--handler", "map_keys", "--map", "question=q,answer=a", "--template", "plain", "--skip-bad"]
    assert run("data", "build", *words, "--max-prompt-length", 10, "--processes", 1) == 0
    assert run("data", "show", output, "--tokenizer", tokenizer_directory) == 0
    captured = capsys.readouterr()
    assert f"columns unread{shown} (1)" in captured.out and f"answer    4{shown}" in captured.out
    assert not set(captured.out + captured.err) & set(evil.replace("]0;evil", "").replace("2J", ""))
    assert main(["data", "show", f"a{evil}.mindrecord"]) == 2
    assert f"no prompt file at a{shown}.mindrecord" in capsys.readouterr().err


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("template", ["plain", "chat"])
def test_build_says_how_prompts_begin(run, tokenizer_directory, tmp_path, capsys, template, adds):
    """With bos, without where the tokenizer has one it does not add, and without though it does."""
    file = tokenizer_directory / "tokenizer.json"
    backend = hf.Tokenizer.from_file(str(file))
    backend.add_special_tokens(["<s>"])
    if adds:
        backend.post_processor = hf.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 9)])
    backend.save(str(file))
    config = {"eos_token": "<eos>", "bos_token": "<s>", "chat_template": "{{ messages[0].content }}"}
    (tokenizer_directory / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "a.jsonl").write_text('{"q": "what is", "a": 4}\n')
    output = tmp_path / "o.mindrecord"
    words = ["--input", tmp_path / "a.jsonl", "--output", output, "--tokenizer", tokenizer_directory]
    words += ["--handler", "map_keys", "--map", "question=q,answer=a", "--template", template]
    assert run("data", "build", *words, "--max-prompt-length", 10, "--processes", 1) == 0
    does = "would put it before a text" if adds else "puts none before a text"
    begin = f"no token: the template writes no '<s>', and the tokenizer {does}"
    if adds and template == "plain":
        begin = "'<s>' (9), once"
    assert f"begin      {begin}\n" in capsys.readouterr().out


def test_show_refuses_another_tokenizer_and_a_foreign_file(run, tokenizer_directory, tmp_path):
    (tmp_path / "x.mindrecord").write_text("no")
    with pytest.raises(UserError, match="is not a prompt file"):
        run("data", "show", tmp_path / "x.mindrecord")
    assert main(["data", "show", str(tmp_path / "x.mindrecord"), "--num", "-1"]) == 2


@pytest.mark.parametrize("text", ["question", "question=", "=q", "question=q,"])
def test_faulty_map_is_a_usage_error(run, text, capsys):
    with pytest.raises(SystemExit):
        run("data", "build", "--map", text)
    assert "expected question=KEY,answer=KEY" in capsys.readouterr().err


def test_build_and_show_images(run, tmp_path, capsys):
    model = write_tiny_vl(tmp_path / "model")
    Image.new("RGB", (100, 60), (200, 0, 0)).save(tmp_path / "a.png")
    rows = [{"q": "how <image> red?", "pics": ["a.png"]}, {"q": "no picture"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output, shown = tmp_path / "o.mindrecord", tmp_path / "shown"
    flags = [
        "--handler",
        "map_keys",
        "--map",
        "question=q,images=pics",
        "--template",
        "plain",
        "--max-prompt-length",
        90,
    ]
    common = ["--input", tmp_path / "a.jsonl", "--output", output, "--tokenizer", model, "--processes", 1]
    assert run("data", "build", *common, *flags, "--min-pixels", 784, "--max-pixels", 4 * 784) == 0
    assert "images     1 in 1 records, at most 1 in one and 2 tokens each" in capsys.readouterr().out
    assert run("data", "show", output, "--tokenizer", model, "--images", shown) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "how <|vision_start|><|image_pad|><|vision_end|> red?" in lines
    assert f"image     56 x 28 pixels  {shown / '000000_0.png'}" in lines
    assert [path.name for path in shown.iterdir()] == ["000000_0.png"]
    assert (np.asarray(Image.open(shown / "000000_0.png")) == (200, 0, 0)).all()
