"""GRPO of a small model with experts on the CPU: one rank and two train alike, routers and experts move."""

import json
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from slow_tests import SLOW
from tiny_models import FAMILIES

from mindrlhf.weights.hf import SafetensorsDirectory

pytestmark = pytest.mark.timeout(500)

NUM_STEPS = 2
EXPERTS = {**FAMILIES["qwen3_moe"], "model_type": "qwen3_moe", "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory, rollout_python) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    sanity_inputs.make(directory)
    config = json.loads((directory / "bare" / "config.json").read_text())
    (directory / "bare" / "config.json").write_text(json.dumps({**config, **EXPERTS}))
    options = ("--config", directory / "bare" / "config.json", "--tokenizer", directory / "bare")
    sanity_inputs.run("weights", "random", *options, "--output", directory / "experts", timeout_s=60)
    return directory


@pytest.fixture(scope="module")
def runs(inputs_dir, tmp_path_factory) -> dict[int, Path]:
    """The output directory of the same run on each number of ranks."""
    directories = {}
    for world_size in (1, 2):
        directories[world_size] = tmp_path_factory.mktemp(f"ranks{world_size}") / "run"
        sanity_inputs.train(
            inputs_dir,
            directories[world_size],
            "--workers",
            world_size,
            timeout_s=300,
            model__path=inputs_dir / "experts",
            run__max_steps=NUM_STEPS,
            observe__groups_per_step=16,
        )
    return directories


@pytest.fixture(scope="module")
def replayed_run(inputs_dir, tmp_path_factory) -> Path:
    """The output directory of a run that replays the generator's routing."""
    directory = tmp_path_factory.mktemp("replayed") / "run"
    sanity_inputs.train(
        inputs_dir,
        directory,
        timeout_s=300,
        model__path=inputs_dir / "experts",
        run__max_steps=NUM_STEPS,
        training__replay_routing="true",
        training__packing="shared_prompts",
    )
    return directory


def test_a_run_replays_the_routing(replayed_run):
    lines = sanity_inputs.read_lines(replayed_run / "metrics.jsonl")
    assert len(lines) == NUM_STEPS
    for line in lines:
        assert line["rollout_diff/max_abs"] < 1e-4
        assert line["grad_norm"] > 0


@SLOW
def test_a_run_that_replays_the_routing_is_the_run_without(replayed_run, runs):
    """Generator and trainer compute alike here, so that their routers choose alike: replay must change nothing."""
    for replayed, plain in zip(*(sanity_inputs.read_lines(run / "metrics.jsonl") for run in (replayed_run, runs[1]))):
        assert replayed["loss"] == pytest.approx(plain["loss"], abs=1e-5)
        assert replayed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)


@SLOW
def test_one_rank_and_two_train_alike(runs):
    alone, together = (sanity_inputs.read_lines(runs[size] / "metrics.jsonl") for size in (1, 2))
    assert len(alone) == len(together) == NUM_STEPS
    assert (runs[1] / "samples.jsonl").read_text() == (runs[2] / "samples.jsonl").read_text()
    for first, second in zip(alone, together):
        assert second["loss"] == pytest.approx(first["loss"], abs=1e-5)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)


@SLOW
def test_the_server_samples_from_the_trained_weights(runs):
    for line in sanity_inputs.read_lines(runs[1] / "metrics.jsonl"):
        assert line["rollout_diff/max_abs"] < 1e-4
        assert line["grad_norm"] > 0


def test_routers_and_experts_are_trained(replayed_run, inputs_dir):
    trained, start = SafetensorsDirectory(replayed_run / "final"), SafetensorsDirectory(inputs_dir / "experts")
    names = [name for name in start.names() if ".mlp." in name]
    assert len(names) == sanity_inputs.SMALLER["num_hidden_layers"] * (1 + 4 * 3)
    for name in names:
        assert np.abs(trained.read(name) - start.read(name)).max() > 1e-5, name
