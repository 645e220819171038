"""Names on hubs stand for directories of the caches: every layout that a client has written, and nothing is fetched."""

import json
import socket
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
COMMIT, OTHER = "a" * 40, "b" * 40


def put(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"here": str(directory)}))
    return directory


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "MODELSCOPE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("something asks a network"))
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        ("", "", ".cache/huggingface/hub"),
        ("HF_HUB_CACHE", "~/elsewhere", "elsewhere"),
        ("HF_HOME", "~/hf", "hf/hub"),
        ("XDG_CACHE_HOME", "~/xdg", "xdg/huggingface/hub"),
    ],
)
def test_hugging_faces_cache_by_what_the_main_branch_was(home, monkeypatch, variable, value, folder):
    if variable:
        monkeypatch.setenv(variable, value)
    repository = home / folder / "models--Qwen--Qwen2.5-7B-Instruct"
    put(repository / "snapshots" / OTHER)
    assert cache.find(NAME) == repository / "snapshots" / OTHER, "the only one, fetched by its commit"
    wanted = put(repository / "snapshots" / COMMIT)
    assert cache.find(NAME) is None, "two, and nothing says which"
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert cache.find(NAME) == wanted
    (repository / "refs" / "main").write_text("../../../../etc")
    assert cache.find(NAME) is None


@pytest.mark.parametrize(
    "folder",
    [
        "models/Qwen--Qwen2.5-7B-Instruct/snapshots/master",
        "models/Qwen/Qwen2___5-7B-Instruct",
        "hub/models/Qwen/Qwen2___5-7B-Instruct",
        "hub/Qwen/Qwen2___5-7B-Instruct",
        "hub/models/Qwen/Qwen2.5-7B-Instruct",
    ],
)
def test_modelscopes_caches(home, monkeypatch, folder):
    wanted = put(home / ".cache" / "modelscope" / folder)
    assert cache.find(NAME) == wanted
    assert cache.find("Qwen/Qwen2.5-7B") is None
    monkeypatch.setenv("MODELSCOPE_CACHE", str(home / "elsewhere"))
    assert cache.find(NAME) is None


def test_data_sets_have_a_place_of_their_own(home):
    put(home / ".cache/huggingface/hub/models--openai--gsm8k/snapshots" / COMMIT)
    assert cache.find("openai/gsm8k", cache.DATASETS) is None
    wanted = put(home / ".cache/huggingface/hub/datasets--openai--gsm8k/snapshots" / COMMIT)
    assert cache.find("openai/gsm8k", cache.DATASETS) == wanted


def test_what_is_there_wins_and_what_is_no_name_stays(home):
    put(home / ".cache/huggingface/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots" / COMMIT)
    assert cache.local_directory(NAME).endswith(COMMIT)
    put(home / NAME)
    assert cache.local_directory(NAME) == NAME
    for text in ("", "model", "a/b/c", "/a/b", "../b", "a/..", "./b", "runs/final"):
        assert cache.local_directory(text) == text


CONFIGS = {"train": GrpoConfig, "sft": SftConfig, "dpo": DpoConfig, "reward-model": RewardModelConfig}


@pytest.mark.parametrize("task", CONFIGS)
def test_every_key_that_names_a_model_takes_a_name(home, task):
    directory = put(home / ".cache/huggingface/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots" / COMMIT)
    fields = {dotted: field for dotted, field, _ in dotted_keys(CONFIGS[task])}
    models = [dotted for dotted, field in fields.items() if field.metadata["is_model"]]
    said = [dotted for dotted, field in fields.items() if field.metadata["doc"].startswith("Hugging Face ")]
    assert models == said and {"model.path", "data.tokenizer_dir"} <= set(models)
    config = read_content(task, {}, [f"{dotted}={NAME}" for dotted in models]).config
    for dotted in models:
        section, _, name = dotted.partition(".")
        assert getattr(getattr(config, section), name) == str(directory), dotted


def test_commands_take_a_name(home):
    directory = str(put(home / ".cache/huggingface/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots" / COMMIT))
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
