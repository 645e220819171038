"""The commands in README, docs and examples run as they are typed, page by page, in a directory with what they name.

The nightly walk (tests/jobs/test_page_walk.py) runs blocks whole in a clone. This runs every day what needs no NPU, no
training and no download, with small stand-ins for models and data of the hub, so that blocks which the walk has to
leave out are tried too. Every other `mindrlhf` command must be in ``NOT_RUN``.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from page_blocks import PAGES, ROOT, Block, blocks, commands

from mindrlhf.cli import main
from mindrlhf.weights.convert import export_hf, random_hf_weights

# The first words of commands that are not run here, and why.
NOT_RUN = {
    "mindrlhf doctor": "asks both environments; in tests/test_doctor.py",
    "mindrlhf train": "trains; configs of examples are checked below",
    "mindrlhf dpo": "trains",
    "mindrlhf reward-model": "trains",
    "mindrlhf eval": "starts vLLM",
    "mindrlhf models get": "fetches; in tests/hub",
    "mindrlhf data get": "fetches; in tests/hub",
    "mindrlhf diff": "needs two runs; in tests/jobs/test_fault_matrix.py",
    "mindrlhf report": "needs a run; in tests/observe/test_report.py",
    "mindrlhf view": "needs a run; in tests/observe",
    "mindrlhf rewards serve": "serves until it is ended; in tests/jobs/test_judge_served.py",
    "mindrlhf tools --names mcp:": "starts a server; in tests/tools/test_mcp.py",
    "mindrlhf data build --input runs/lake/train.jsonl": "needs the prompts of the line before",
    "mindrlhf data build --input runs/lake/test.jsonl": "needs the prompts of the line before",
    "mindrlhf weights convert SmolLM2-135M-Instruct.Q4_1.gguf": "needs a published file; in tests/weights/test_gguf.py",
    "mindrlhf weights merge-adapter": "needs an adapter; in tests/weights/adapters",
    **dict.fromkeys(
        (
            "mindrlhf data build --input train.parquet",
            "mindrlhf data build --input geo3k_train.parquet",
            "mindrlhf data build --input geo3k/train.parquet",
            "mindrlhf data build --input geo3k/test.parquet",
            "mindrlhf data show train.mindrecord --tokenizer Qwen2.5-VL-7B-Instruct",
            "mindrlhf data show geo3k_train.mindrecord",
            "mindrlhf data show runs/vision/test.mindrecord",
        ),
        "needs pictures; in tests/data",
    ),
}
MODELS = ("MODEL_DIR", "Qwen2.5-7B-Instruct", "qwen2.5_tokenizer", "model")


def is_run(words: list[str]) -> bool:
    return words[0] == "mindrlhf" and not any(" ".join(words).startswith(prefix) for prefix in NOT_RUN)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A model of no size that fits every layout of the pages, with the quickstart's tokenizer."""
    source, directory = ROOT / "examples" / "quickstart" / "checkpoint", tmp_path_factory.mktemp("models") / "model"
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 4}
    config |= {"intermediate_size": 64, "max_position_embeddings": 32768, "head_dim": 8, "layer_types": None}
    export_hf(random_hf_weights(config, 0), config, directory, tokenizer_dir=str(source))
    return directory


@pytest.fixture(scope="session")
def shop(tmp_path_factory, model_dir) -> Path:
    """A fresh clone's files, and the data and models that the pages take for granted."""
    tmp_path = tmp_path_factory.mktemp("shop")
    for name in ("examples", "model_configs", "scripts", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in MODELS:
        (tmp_path / name).symlink_to(model_dir)
    thinking = tmp_path / "Qwen3-8B"  # one whose template reads an option
    thinking.mkdir()
    (thinking / "tokenizer.json").symlink_to(model_dir / "tokenizer.json")
    tokenizer_config = json.loads((model_dir / "tokenizer_config.json").read_text())
    tokenizer_config["chat_template"] += "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    (thinking / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    record = {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7", "problem": "What is 3 + 4?"}
    record |= {"level": 1, "meta": {"unit_tests": ["7"]}}
    record |= {"solution": "7", "result": "7", "expected": "7", "kind": "accuracy_reward"}
    record |= {"reward_model": {"ground_truth": "7"}}
    for name in ("train.jsonl", "test.jsonl", "problems.jsonl", "gsm8k_train.jsonl"):
        (tmp_path / name).write_text(f"{json.dumps(record)}\n" * 8)
    rubric = [{"criterion": "names a drug", "weight": 5}, "is polite"]
    (tmp_path / "care.jsonl").write_text(json.dumps({"question": "What helps?", "rubric": rubric}) + "\n")
    (tmp_path / "samples.jsonl").write_text(json.dumps({"completion": "#### 7", "answer": "7"}) + "\n")
    (tmp_path / "path" / "to").mkdir(parents=True)
    source = "def brief(completion, answer):\n    return 1.0 / (1 + len(completion))\n"
    (tmp_path / "path" / "to" / "file.py").write_text(source)
    quickstart = tmp_path / "runs" / "quickstart"
    quickstart.mkdir(parents=True)
    for name in ("train", "test"):
        shutil.copy(tmp_path / f"{name}.jsonl", quickstart)
    shutil.copytree(ROOT / "examples" / "quickstart" / "checkpoint", quickstart / "grpo" / "final")
    for name in ("gsm8k_train", "gsm8k_test"):
        build = ["--output", f"{tmp_path}/{name}.mindrecord", "--tokenizer", str(model_dir)]
        assert main(["data", "build", "--input", f"{tmp_path}/train.jsonl", *build, "--max-prompt-length", "400"]) == 0
    return tmp_path


@pytest.fixture
def workshop(tmp_path, monkeypatch, shop) -> None:
    """A copy of the shop to work in."""
    shutil.copytree(shop, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def _save_or_echo(block: Block) -> None:
    """What a block leaves for those after it: a file of its name, or what its `echo` writes."""
    if block.file:
        Path(block.file).write_text(block.text, encoding="utf-8")
    for line in block.text.splitlines() if block.is_command else ():
        if line.startswith("echo "):
            subprocess.run(["bash", "-c", line], check=True)


WITH_COMMANDS = [page for page in PAGES if any(is_run(words) for block in blocks(page) for words in commands(block))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=_name)
def test_commands_run_as_typed(page, workshop, capsys):
    for block in blocks(page):
        _save_or_echo(block)
        for words in filter(is_run, commands(block)):
            code = main(words[1:])
            assert code == 0, f"{block}: {' '.join(words)}: {capsys.readouterr().err}"
            capsys.readouterr()
