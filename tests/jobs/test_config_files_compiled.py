"""The update of every file in model_configs and examples that says `ascend`, compiled for its layout with two layers.

So no published layout meets the compiler for the first time on a cluster.
"""

import platform
import re
from pathlib import Path

import pytest
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.config.load import load_grpo_config
from mindrlhf.dryrun.compile.request import compile_ranks, compiled_config
from mindrlhf.dryrun.compile.strategy import _requests
from mindrlhf.layout.layout import Layout
from mindrlhf.weights.hf import read_hf_config

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
    pytest.mark.timeout(3000),
]
_ASCEND = re.compile(r"^\s*device: *ascend", re.M)
FILES = sorted(
    path
    for folder in ("model_configs", "examples")
    for path in (ROOT / folder).rglob("*.yaml")
    if _ASCEND.search(path.read_text(encoding="utf-8"))
)
USERS_KEYS = ("data.train_file=prompts", "data.tokenizer_dir=tokenizer", "reward.verifier_function=accuracy_reward")
# Data parallelism alone, in seconds; the others nightly.
OF_EVERY_DAY = ("grpo_qwen2_5_0_5b_8npu.yaml",)
TUTORIAL_RANKS = 8


def config_of(path):
    """Return the config of a file, the config.json of its model, and the number of its ranks."""
    match = re.search(r"_(\d+)npu", path.stem)
    num_ranks = int(match[1]) if match else TUTORIAL_RANKS
    keys = [*USERS_KEYS, "model.path=model"]
    config = load_grpo_config(path, keys, world_size=num_ranks)
    if not config.training.sequence_lengths:
        longest = 2 * config.rollout.max_response_length
        config = load_grpo_config(path, [*keys, f"training.sequence_lengths=[{longest}]"], world_size=num_ranks)
    name = re.sub(r"^(grpo|predict)_|_\d+npu.*$", "", path.stem)
    directories = {one.parent.name: one.parent for one in (ROOT / "model_configs").rglob("config.json")}
    known = name if name in directories else next((one for one in sorted(directories) if one.startswith(name)), "")
    return config, read_hf_config(directories[known or "qwen2_5_7b"]), num_ranks


def requests_of(path):
    config, hf_config, num_ranks = config_of(path)
    layout = Layout.from_config(config.parallel_config, num_ranks)
    return list(_requests(config, compiled_config(hf_config), layout, 2).values())


def test_the_files_are_there():
    assert len(FILES) > 20 and {*OF_EVERY_DAY} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_says_what_is_to_be_compiled(path):
    first = requests_of(path)[0]
    assert 1 <= first.num_layers <= 8 and first.seq_length > 1


@pytest.mark.parametrize(
    "path", [path for path in FILES if RUNS_SLOW_TESTS or path.name in OF_EVERY_DAY], ids=lambda path: path.stem
)
def test_the_layout_of_a_file_is_compiled(path):
    for report in compile_ranks(requests_of(path), num_processes=1):
        assert report.parameters and report.collectives is not None
