"""Names on hubs stand for directories of the caches, and nothing is fetched."""

import json
import socket
import sys
import types
from pathlib import Path

import pytest

from mindrlhf.cli import build_parser
from mindrlhf.config.load import read_content
from mindrlhf.config.parse import dotted_keys
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.hub import cache
from mindrlhf.weights.hf import read_hf_config

NAME = "Qwen/Qwen2.5-7B-Instruct"
COMMIT = "a" * 40


def put(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"here": str(directory)}))
    return directory


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("something asks a network"))
    return tmp_path


def put_snapshot(home: Path, kind: str = "models") -> Path:
    """Lay a snapshot into Hugging Face's cache as its client does."""
    repository = home / "hub" / f"{kind}--Qwen--Qwen2.5-7B-Instruct"
    directory = put(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return directory


def test_a_data_set_of_the_name_is_no_model(home):
    put_snapshot(home, "datasets")
    assert cache.local_directory(NAME) == NAME


def test_modelscopes_cache_is_asked_second(home, monkeypatch):
    client = types.ModuleType("modelscope")
    client.snapshot_download = lambda name, local_files_only: f"{name} of ModelScope" if local_files_only else ""
    monkeypatch.setitem(sys.modules, "modelscope", client)
    assert cache.local_directory(NAME) == f"{NAME} of ModelScope"
    put_snapshot(home)
    assert cache.local_directory(NAME).endswith(COMMIT)


def test_what_is_there_wins_and_what_is_no_name_stays(home):
    put_snapshot(home)
    assert cache.local_directory(NAME).endswith(COMMIT)
    put(home / NAME)
    assert cache.local_directory(NAME) == NAME
    for text in ("", "model", "a/b/c", "/a/b", "../b", "a/..", "./b", "runs/final"):
        assert cache.local_directory(text) == text


CONFIGS = {"train": GrpoConfig, "sft": SftConfig, "dpo": DpoConfig, "reward-model": RewardModelConfig}


@pytest.mark.parametrize("task", CONFIGS)
def test_every_key_that_names_a_model_takes_a_name(home, task):
    directory = put_snapshot(home)
    fields = {dotted: field for dotted, field, _ in dotted_keys(CONFIGS[task])}
    models = [dotted for dotted, field in fields.items() if field.metadata["is_model"]]
    said = [dotted for dotted, field in fields.items() if field.metadata["doc"].startswith("Hugging Face ")]
    assert models == said and {"model.path", "data.tokenizer_dir"} <= set(models)
    config = read_content(task, {}, [f"{dotted}={NAME}" for dotted in models]).config
    for dotted in models:
        section, _, name = dotted.partition(".")
        assert getattr(getattr(config, section), name) == str(directory), dotted


def test_commands_take_a_name(home):
    directory = str(put_snapshot(home))
    parse = build_parser().parse_args
    build = ["data", "build", "--input", "x", "--output", "y", "--max-prompt-length", "9", "--tokenizer", NAME]
    assert parse(build).tokenizer == directory
    assert parse(["weights", "inspect", NAME]).source == directory
    assert parse(["weights", "import", NAME, "--output", "y"]).source == directory
    assert parse(["weights", "shard", NAME, "--parallel", "mp=2", "--output", "y"]).source == directory
    evaluated = parse(["eval", "c.yaml", "--model", NAME, "--baseline", NAME])
    assert (evaluated.model, evaluated.baseline) == (directory, directory)


def test_one_that_is_in_no_cache_is_one_line_with_the_command():
    for load in (read_hf_config, load_tokenizer):
        with pytest.raises(UserError, match=f", or fetch it first: mindrlhf models get {NAME}$"):
            load(NAME)
        with pytest.raises(UserError) as error:
            load("no/such/directory")
        assert "fetch" not in str(error.value)
