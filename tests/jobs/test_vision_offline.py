"""`mindrlhf sft` and `dpo` on image prompts, as commands: two ranks, and a resumed run is the same run."""

import json
import shutil

import numpy as np
import pytest
import sanity_inputs
from PIL import Image
from slow_tests import SLOW
from tiny_vl import TinyVl, write_tiny_vl

from mindrlhf.weights.hf import SafetensorsDirectory

pytestmark = [pytest.mark.timeout(600), SLOW]

NUM_STEPS = 6
MODEL = TinyVl(hidden=64, heads=2, kv_heads=1, intermediate=96)
SECTIONS = {
    "sft": {"training": {"rows_per_step": 4, "micro_batch_size": 2, "sequence_lengths": [64], "epochs": 4}},
    "dpo": {"training": {"pairs_per_step": 4, "micro_batch_size": 4, "sequence_lengths": [64], "epochs": 4}},
}
TASKS = {"sft": "sft", "dpo": "preference"}


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory):
    """A model, and records with one image, two, and none."""
    directory = tmp_path_factory.mktemp("inputs")
    write_tiny_vl(directory / "model", MODEL)
    rng, records = np.random.default_rng(5), []
    for number in range(16):
        paths = []
        for index in range(number % 3):
            paths.append(f"{number}_{index}.png")
            pixels = rng.integers(0, 256, (4, 6, 3), np.uint8)
            Image.fromarray(pixels).resize((56, 84 - 28 * index)).save(directory / paths[-1])
        record = {"q": f"Which is {number}?", "good": f"It is {number}.", "bad": "None.", "pics": paths}
        records.append(json.dumps(record) + "\n")
    (directory / "records.jsonl").write_text("".join(records))
    for task, fields in (("sft", "response=good"), ("preference", "response=good,rejected=bad")):
        sanity_inputs.run(
            *("data", "build", "--task", task, "--input", directory / "records.jsonl"),
            *("--output", directory / f"{task}.mindrecord", "--tokenizer", directory / "model"),
            *("--handler", "map_keys", "--map", f"question=q,{fields},images=pics", "--template", "plain"),
            *("--max-prompt-length", 48, "--max-length", 64, "--min-pixels", 784, "--processes", 1),
            timeout_s=120,
        )
    return directory


@pytest.mark.parametrize("command", SECTIONS)
def test_a_resumed_run_is_the_same_run(inputs_dir, tmp_path, command):
    output_dir, path = tmp_path / "run", tmp_path / "config.yaml"
    config = {
        "model": {"path": str(inputs_dir / "model")},
        "data": {
            "train_file": str(inputs_dir / f"{TASKS[command]}.mindrecord"),
            "tokenizer_dir": str(inputs_dir / "model"),
        },
        "run": {"output_dir": str(output_dir), "max_steps": NUM_STEPS},
        "optimizer": {"start_lr": 1e-3, "end_lr": 0.0, "lr_schedule": "linear"},
        "checkpoint": {"every_steps": 2, "keep_last": 5},
        "observe": {"sinks": []},
        **SECTIONS[command],
    }
    path.write_text(json.dumps(config))
    sanity_inputs.run(command, path, "--workers", 2, timeout_s=400)
    losses = [line["loss"] for line in sanity_inputs.read_lines(output_dir / "metrics.jsonl") if "loss" in line]
    assert len(losses) == NUM_STEPS and losses[-1] < losses[0]
    before = (output_dir / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(output_dir / "final")
    for directory in sorted((output_dir / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(directory)
    sanity_inputs.run(command, path, "--workers", 2, "--resume", timeout_s=400)
    assert (output_dir / "final" / "model.safetensors").read_bytes() == before
    trained, start = SafetensorsDirectory(output_dir / "final"), SafetensorsDirectory(inputs_dir / "model")
    for name in start.names():
        assert np.array_equal(trained.read(name), start.read(name)) == name.startswith("visual."), name
