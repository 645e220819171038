"""The tutorial's data script, run as its users run it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.tokenizers import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo" / "qwen_grpo_tutorial" / "rlhf_data.py"


def _run(**flags):
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=150)


@pytest.mark.skipif(not os.environ.get("MINDRLHF_SHARED"), reason="needs MINDRLHF_SHARED")
@pytest.mark.timeout(180)
def test_vocabulary_and_merges_may_lie_apart(tmp_path):
    source = Path(os.environ["MINDRLHF_SHARED"], "data", "qwen2.5_tokenizer")
    (tmp_path / "v").mkdir()
    vocab = shutil.copy(source / "vocab.json", tmp_path / "v" / "qwen_vocab.json")
    shutil.copy(source / "tokenizer_config.json", tmp_path / "v")
    merges = shutil.copy(source / "merges.txt", tmp_path / "qwen_merges.txt")
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"question": "6*7?", "answer": "6*7=42\n#### 42"}) + "\n")
    output = tmp_path / "train.mindrecord"
    done = _run(vocab_path=vocab, merges_file_path=merges, file_path=data, output_path=output, dataset_type="gsm8k")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 kept of 1 read" in done.stdout
    tokenizer = load_tokenizer(source)
    (record,) = PromptFile.open(output, tokenizer.fingerprint).read([0])
    assert record.answer == "42"
    assert tokenizer.decode(record.prompt_ids, False).endswith("user\n6*7?<|im_end|>\n<|im_start|>assistant\n")


def test_user_errors_are_one_line(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    flags = {"vocab_path": tmp_path / "absent.json", "merges_file_path": tmp_path / "absent.txt"}
    done = _run(**flags, file_path=data, output_path=tmp_path / "o.mindrecord", dataset_type="gsm8k")
    assert done.returncode == 2
    assert done.stderr == f"rlhf_data.py: error: no such tokenizer file: {tmp_path / 'absent.json'}\n"
