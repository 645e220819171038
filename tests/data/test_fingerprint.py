"""Replaced, changed and moved data of a run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from prompt_files import header_of, write_with_header

from mindrlhf.data.fingerprint import check_same_data, data_fingerprint
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError


def write(path: Path, num_records: int = 3, answer: str = "42", **header) -> str:
    path.parent.mkdir(exist_ok=True)
    records = [
        Prompt(np.arange(1 + i, dtype=np.int32), np.zeros(0, np.int32), answer, f"r{i}")
        for i in range(num_records)
    ]
    write_with_header(path, header_of(num_records, **header), [records])
    return str(path)


def write_tokenizer(directory: Path, *more_tokens: str) -> str:
    directory.mkdir(exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(("<s>", "a", "b", *more_tokens))}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<s>"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    return str(directory)


@pytest.fixture
def data(tmp_path) -> dict:
    return {
        "train_file": write(tmp_path / "train.mindrecord"),
        "eval_file": write(tmp_path / "eval.mindrecord", answer="43"),
        "tokenizer_dir": write_tokenizer(tmp_path / "tokenizer"),
        "shuffle": True,
    }


def resume(old: dict, old_data: dict, data: dict) -> None:
    """Resume from a fingerprint that was written as JSON and read again."""
    check_same_data(json.loads(json.dumps(old)), old_data, data_fingerprint(data), data)


def test_the_same_files_and_the_same_ones_moved_are_taken(data, tmp_path):
    old = data_fingerprint(data)
    resume(old, data, data)
    moved = {**data}
    for key in ("train_file", "eval_file"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        for name in (data[key], f"{data[key]}.db"):
            shutil.move(name, tmp_path / "elsewhere")
        moved[key] = str(tmp_path / "elsewhere" / Path(data[key]).name)
    moved["tokenizer_dir"] = shutil.move(data["tokenizer_dir"], tmp_path / "elsewhere" / "other_name")
    resume(old, data, moved)


def test_a_checkpoint_without_fingerprints_is_resumed(data):
    resume({}, data, data)


@pytest.mark.parametrize("key", ["train_file", "eval_file"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"answer": "44"}, r"holds other records \(checksum \w{12}, not \w{12}\)"),
        ({"num_records": 2}, "has 2 records, not 3"),
        (
            {"template": "chat", "template_sha256": "b" * 64},
            r"was built with template 'chat' \(b{12}\), not 'plain' \(a{12}\)",
        ),
        ({"tokenizer_fingerprint": "u" * 64}, "has tokenizer u{12}, not t{12}"),
    ],
)
def test_a_replaced_file_is_named_with_what_has_changed(data, key, change, message):
    old = data_fingerprint(data)
    write(Path(data[key]), **change)
    with pytest.raises(UserError, match=f"^cannot resume the checkpoint: data.{key} {data[key]} {message}: put back"):
        resume(old, data, data)


def test_another_train_file_is_refused_and_another_eval_file_is_another_evaluation(data, tmp_path):
    old = data_fingerprint(data)
    other = write(tmp_path / "other.mindrecord", answer="7")
    resume(old, data, {**data, "eval_file": other})
    resume(old, data, {**data, "eval_file": ""})
    with pytest.raises(UserError, match="other.mindrecord holds other records"):
        resume(old, data, {**data, "train_file": other})


def test_another_tokenizer_in_the_same_place_is_named(data):
    first = load_tokenizer(data["tokenizer_dir"]).fingerprint
    old = data_fingerprint(data)
    second = load_tokenizer(write_tokenizer(Path(data["tokenizer_dir"]), "c")).fingerprint
    with pytest.raises(UserError, match=f"data.tokenizer_dir .* has tokenizer {second[:12]}, not {first[:12]}: put"):
        resume(old, data, data)
