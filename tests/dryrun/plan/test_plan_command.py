"""`mindrlhf plan` as a user runs it: examples, files, errors of one line."""

import json
import subprocess
import sys

import pytest
from plan_cases import EXAMPLES, LAYOUTS, ROOT, example

from mindrlhf.cli import main


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch):
    """The examples name their model relative to the repository."""
    monkeypatch.chdir(ROOT)


def _plan(*words: str) -> int:
    return main(["plan", *map(str, words)])


@pytest.mark.parametrize("name, world_size", EXAMPLES.items())
def test_examples_fit_their_machines(name, world_size, capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert _plan(example(name), "--workers", world_size, "--json", out) == 0
    text = capsys.readouterr().out
    assert "\nFITS: " in text
    assert max(map(len, text.splitlines())) <= 100
    values = json.loads(out.read_text())
    assert all(row.keys() >= {"shape", "shard_shape"} for row in values["parameters"])
    assert values["verdict"]["fits"]
    assert values["machine"]["world_size"] == world_size
    assert f"{values['model']['num_parameters']:,} parameters" in text
    peak = max(phase["total"] for phase in values["memory"])
    assert peak < 64e9
    assert all(phase["total"] == sum(item["size_bytes"] for item in phase["items"]) for phase in values["memory"])
    assert values["seconds"]["phases"].keys() >= {"sampling", "update"}


def test_what_does_not_fit_ends_with_1(capsys):
    assert _plan(example("qwen2_5_7b_8npu"), "--workers", 8, "--device-memory", "30GB") == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_search_is_reported_and_its_best_layout_fits(capsys, tmp_path):
    out = tmp_path / "plan.json"
    words = [example("qwen2_5_7b_8npu"), "--workers", 8]
    assert _plan(*words, "--search", "--json", out) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    best = json.loads(out.read_text())["search"]["best"][0]
    overrides = [f"{key}={str(value).lower()}" for key, value in best["keys"].items()]
    assert all(f"  {override}\n" in text + "\n" for override in overrides)
    assert _plan(*words, *overrides, "--json", out) == 0
    assert max(phase["total"] for phase in json.loads(out.read_text())["memory"]) == best["peak_bytes"]


def test_another_number_of_devices_is_planned_as_with_the_keys_that_are_said(capsys):
    assert _plan(example("qwen2_5_7b_8npu"), "--workers", 16) == 0
    first, keys, text = capsys.readouterr().out.split("\n", 2)
    assert keys.split() == ["parallel_config.data_parallel=16", "rollout.num_replicas=8"]
    assert max(map(len, (first, keys))) <= 100
    assert _plan(example("qwen2_5_7b_8npu"), "--workers", 16, *keys.split()) == 0
    assert capsys.readouterr().out == text.removeprefix("\n")


BAD = {
    "device memory": (["--workers", 8, "--device-memory", "64XB"], "--device-memory '64XB' is not a size"),
    "world size": (["--workers", 12, "parallel_config.data_parallel=8"], "12 were started: set data_parallel to 12"),
    "no devices": (["--workers", 0], "--workers is 0"),
    "no node": (["--workers", 8, "--node-size", 0], "--node-size is 0"),
    "heads": (
        ["--workers", 8, "parallel_config.model_parallel=8", "parallel_config.data_parallel=1"],
        "28 query heads: set it to one of 1, 2, 4",
    ),
    "layers": (
        [
            *("--workers", 32, "rollout.num_replicas=16", "parallel_config.data_parallel=1"),
            *("parallel_config.model_parallel=1", "parallel_config.use_seq_parallel=false"),
            *("parallel_config.pipeline_stage=32", "parallel_config.micro_batch_num=32"),
            "training.micro_batch_size=32",
        ],
        "28 layers: set it to 28 or less",
    ),
    "no experts": (["--workers", 8, "parallel_config.expert_parallel=2"], "no experts: set it to 1"),
    "micro-batches": (["--workers", 8, "parallel_config.micro_batch_num=4"], "'training.micro_batch_size' is 1"),
    "rollout devices": (["--workers", 8, "rollout.num_replicas=3"], "uses 6 devices of 8: set num_replicas to 4"),
    "rollout heads": (
        ["--workers", 8, "rollout.num_replicas=1", "rollout.tensor_parallel=8"],
        "'rollout.tensor_parallel' is 8, which does not divide the model's 28 query heads: set it to one of 1, 2, 4",
    ),
    "rollout over nodes": (
        ["--workers", 8, "--node-size", 3, "rollout.num_replicas=2", "rollout.tensor_parallel=4"],
        "'rollout.tensor_parallel' is 4, more than the 3 devices of a node but no number of whole nodes: set it to 3",
    ),
    "rows": (["--workers", 8, *LAYOUTS["qwen2_5_7b_8npu"], "training.sequence_lengths=[4097]"], "set it to 4100"),
    "model": (["--workers", 8, "model.path=nowhere"], "nowhere"),
    "json": (["--workers", 8, "--json", "nowhere/plan.json"], "--json nowhere/plan.json cannot be written"),
}


@pytest.mark.parametrize("words, message", BAD.values(), ids=BAD)
def test_mistakes_are_one_line_with_the_fix(words, message, capsys):
    assert _plan(example("qwen2_5_7b_8npu"), *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mindrlhf plan: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_servers_over_nodes_are_planned_as_they_are_laid(capsys):
    assert _plan(example("deepseek_v3_512npu"), "--workers", 512) == 0
    assert "\n4 servers of 128 devices over 16 nodes; each device" in capsys.readouterr().out
    assert _plan(example("deepseek_v3_512npu"), "--workers", 512, "--node-size", 128) == 0
    assert "\n4 servers of 128 devices; each device" in capsys.readouterr().out


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from mindrlhf.cli import main; "
        f"main(['plan', {str(example('qwen2_5_7b_8npu'))!r}, '--workers', '8']); "
        "print([name for name in ('mindspore', 'mindformers', 'torch', 'vllm') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
