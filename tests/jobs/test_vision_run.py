"""GRPO on image prompts with msrun and vLLM: the server sees what the trainer sees; a resumed run is the same run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from PIL import Image
from slow_tests import SLOW
from tiny_vl import TinyVl, write_tiny_vl

from mindrlhf.weights.hf import SafetensorsDirectory

pytestmark = pytest.mark.timeout(600)

NUM_STEPS = 3
MODEL = TinyVl(hidden=64, heads=2, kv_heads=1, intermediate=96, layers=1)  # a second one doubles the time to compile
# Width and height of the images of each prompt; prompts 4 and 5 show those of 0 and 1, prompt 2 none.
SIZES = ([(56, 84)], [(140, 112)], [], [(28, 56), (84, 84)], [(56, 84)], [(140, 112)])


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory, rollout_python) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), MODEL)


def write_inputs(directory: Path, model: TinyVl) -> Path:
    write_tiny_vl(directory / "model", model)
    rng = np.random.default_rng(3)
    with (directory / "prompts.jsonl").open("w") as file:
        for number, sizes in enumerate(SIZES):
            paths = []
            for index, (width, height) in enumerate(sizes):
                paths.append(f"{number % 4}_{index}.png")
                if not (directory / paths[-1]).exists():
                    pixels = rng.integers(0, 256, (height // 14, width // 14, 3), np.uint8)
                    Image.fromarray(pixels).resize((width, height)).save(directory / paths[-1])
            text = "<image>" * len(sizes) + f"What is in picture {number}?"
            file.write(json.dumps({"images": paths, "problem": text, "answer": str(number)}) + "\n")
    sanity_inputs.run(
        *("data", "build", "--input", directory / "prompts.jsonl", "--output", directory / "prompts.mindrecord"),
        *("--tokenizer", directory / "model", "--handler", "geo3k", "--template", "plain"),
        *("--max-prompt-length", 96, "--min-pixels", 784, "--processes", 1),
        timeout_s=120,
    )
    return directory


def train(inputs_dir: Path, output_dir: Path, *options: object, **more: object) -> None:
    settings = {
        "run__max_steps": NUM_STEPS,
        "algorithm__beta": 0.01,
        "training__chunk_size": 3,
        "training__num_minibatches": 2,
        "optimizer__start_lr": 1e-3,
        "checkpoint__every_steps": 1,
        "checkpoint__keep_last": 10,
    }
    sanity_inputs.train(inputs_dir, output_dir, *options, timeout_s=500, **settings | more)


@pytest.fixture(scope="module")
def output_dir(inputs_dir, tmp_path_factory) -> Path:
    """The output directory of a run on two ranks."""
    directory = tmp_path_factory.mktemp("vision") / "run"
    train(inputs_dir, directory, "--workers", 2)
    return directory


def test_the_server_samples_what_the_trainer_computes(output_dir):
    lines = sanity_inputs.read_lines(output_dir / "metrics.jsonl")
    assert len(lines) == NUM_STEPS
    for line in lines:
        assert line["rollout_diff/mean_abs"] < 1e-5
        assert line["rollout_diff/max_abs"] < 1e-4
        assert line["grad_norm"] > 0
    assert lines[-1]["kl"] > 0


def test_the_decoder_is_trained_and_the_tower_is_not(output_dir, inputs_dir):
    trained, start = SafetensorsDirectory(output_dir / "final"), SafetensorsDirectory(inputs_dir / "model")
    assert set(trained.names()) == set(start.names())
    for name in start.names():
        is_same = np.array_equal(trained.read(name), start.read(name))
        assert is_same == name.startswith("visual."), name
    assert (output_dir / "final" / "preprocessor_config.json").exists()


@SLOW
def test_a_resumed_run_is_the_same_run(output_dir, inputs_dir):
    before = {name: (output_dir / name).read_bytes() for name in ("trajectory.jsonl", "final/model.safetensors")}
    shutil.rmtree(output_dir / "final")
    for step in range(2, NUM_STEPS + 1):
        shutil.rmtree(output_dir / "checkpoints" / f"step_{step:08d}")
    train(inputs_dir, output_dir, "--workers", 2, "--resume")
    for name, content in before.items():
        assert (output_dir / name).read_bytes() == content, name


@SLOW
def test_ppo_resumes_with_a_critic_that_sees(inputs_dir, tmp_path):
    options = {"algorithm__name": "ppo", "critic__path": inputs_dir / "model"}
    run = tmp_path / "run"
    train(inputs_dir, run, "--workers", 1, **options)
    lines = sanity_inputs.read_lines(run / "metrics.jsonl")
    assert all(line["rollout_diff/mean_abs"] < 1e-5 and line["value/grad_norm"] > 0 for line in lines)
    names = ("trajectory.jsonl", "final/model.safetensors", "critic/model.safetensors")
    before = {name: (run / name).read_bytes() for name in names}
    for directory in ("final", "critic", *(f"checkpoints/step_{step:08d}" for step in range(2, NUM_STEPS + 1))):
        shutil.rmtree(run / directory)
    train(inputs_dir, run, "--workers", 1, "--resume", **options)
    for name, content in before.items():
        assert (run / name).read_bytes() == content, name
    critic, start = SafetensorsDirectory(run / "critic"), SafetensorsDirectory(inputs_dir / "model")
    towers = [name for name in critic.names() if name.startswith("visual.")]
    assert towers and all(np.array_equal(critic.read(name), start.read(name)) for name in towers)


@SLOW
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_the_server_of_other_families_samples_what_the_trainer_computes(tmp_path, rollout_python, family):
    layers = 3 if family == "qwen3_vl" else 2
    model = TinyVl(hidden=64, heads=2, kv_heads=1, intermediate=96, family=family, layers=layers, vision_depth=3)
    train(write_inputs(tmp_path / "inputs", model), tmp_path / "run", "--workers", 1)
    for line in sanity_inputs.read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["rollout_diff/mean_abs"] < 1e-5 and line["grad_norm"] > 0
