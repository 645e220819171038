"""Real runs of schedules with tools, environments, images, dynamic sampling and reward models, which are resumed."""

import json
import math
import shutil
from pathlib import Path

import pytest
import sanity_inputs
import test_tool_runs
import test_train_experts
import test_vision_run
from slow_tests import SLOW

from mindrlhf.specs import scorer_config

pytestmark = [pytest.mark.timeout(1200), SLOW]

TIMEOUT_S = 500  # generous: other work may load the machine
NUM_STEPS = 4
SEGMENTS = {"rollout__segment_tokens": 8, "rollout__in_flight": 2}
LAG = {"rollout__off_policy_steps": 1}
ASYNCHRONOUS = {"rollout__segment_tokens": 8, "rollout__off_policy_steps": 2, "rollout__asynchronous": "true"}
CONVERSATIONS = {"rollout__max_response_length": test_tool_runs.MAX_LENGTH, "tools__max_response_tokens": 32}
RUNS = {
    "tools by segments": ("tools", SEGMENTS | CONVERSATIONS | {"tools__names": "calculator"}),
    "tools asynchronously": ("tools", ASYNCHRONOUS | CONVERSATIONS | {"tools__names": "calculator"}),
    "an environment by segments, off-policy": ("environment", SEGMENTS | LAG | CONVERSATIONS),
    "images off-policy": ("images", LAG),
    "a reward model off-policy": ("reward model", LAG),
    "replayed routing by segments": ("experts", SEGMENTS | {"training__replay_routing": "true"}),
    "dynamic sampling by segments": ("sanity", SEGMENTS | {"algorithm__dynamic_sampling": "true"}),
    "dynamic sampling asynchronously": ("sanity", ASYNCHRONOUS | {"algorithm__dynamic_sampling": "true"}),
}


@pytest.fixture(scope="module")
def inputs(rollout_python, tmp_path_factory):
    """Return the directory of inputs of a kind, and the options that go with it."""
    made: dict[str, Path] = {}

    def make(kind: str, directory: Path) -> None:
        if kind in ("tools", "environment"):
            test_tool_runs.make(directory)
            (directory / "digits.py").write_text(test_tool_runs.ENVIRONMENT)
        elif kind == "images":
            test_vision_run.write_inputs(directory, test_vision_run.MODEL)
        else:
            sanity_inputs.make(directory)
            config = json.loads((directory / "model" / "config.json").read_text())
            for name, changed in (("scorer", scorer_config(config)), ("experts", config | test_train_experts.EXPERTS)):
                (directory / f"{name}.json").write_text(json.dumps(changed))
                arguments = ("--config", directory / f"{name}.json", "--tokenizer-dir", directory / "model")
                finished = sanity_inputs.run("weights", "random", *arguments, "--out", directory / name, timeout_s=300)
                assert finished.returncode == 0, finished.stderr

    def find(kind: str) -> tuple[Path, dict[str, object]]:
        if kind not in made:
            directory = tmp_path_factory.mktemp("inputs")
            make(kind, directory)
            made[kind] = directory
        directory = made[kind]
        environment = {"tools__environment": f"{directory / 'digits.py'}:Digits"}
        environment |= {"reward__verifier_function": "environment_reward"}
        options = {
            "environment": environment,
            "images": {"training__chunk_size": 3, "optimizer__start_lr": 1e-3},
            "reward model": {"reward__model_path": directory / "scorer"},
            "experts": {"model__path": directory / "experts"},
        }
        return directory, options.get(kind, {})

    return find


def train(directory: Path, output_dir: Path, *options: object, **more: object) -> None:
    settings = {"run__max_steps": NUM_STEPS, "training__epochs": 50}
    settings |= {"checkpoint__every_steps": 1, "checkpoint__keep_last": 10, "observe__tensorboard": "false"}
    finished = sanity_inputs.train(directory, output_dir, *options, timeout_s=TIMEOUT_S, **settings | more)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_and_is_repeated(name, inputs, tmp_path):
    kind, schedule = RUNS[name]
    directory, options = inputs(kind)
    run = tmp_path / "run"
    train(directory, run, **schedule | options)
    lines = sanity_inputs.read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line in lines:
        assert math.isfinite(line["loss"]) and line["grad_norm"] >= 0
        # The generator went on after the very tokens that were trained, where weights are the same.
        assert line.get("rollout_diff/max_abs", 0) < 1e-4
    assert "rollout_diff/max_abs" in lines[0] and max(line["grad_norm"] for line in lines) > 0
    if kind == "tools":
        assert all(line["tools/calls"] > line["tools/failures"] > 0 and line["turns/mean"] > 1 for line in lines)
        assert max(line["segments/max"] for line in lines) > 1, "responses go on with other weights"
    if kind == "environment":
        assert all(line["turns/mean"] > 1 and line["tools/failures"] == line["reward/failures"] == 0 for line in lines)
    if kind == "reward model":
        assert all(math.isfinite(line["reward/reward_model/mean"]) for line in lines)
    names = ("trajectory.jsonl", "final/model.safetensors", "samples.jsonl")
    before = {one: (run / one).read_bytes() for one in names}
    if "asynchronously" in name:
        again = tmp_path / "again"
        train(directory, again, "--replay-order", run, **schedule | options)
    else:
        again = run
        for one in ("final", *(f"checkpoints/step_{step:08d}" for step in range(2, NUM_STEPS + 1))):
            shutil.rmtree(run / one)
        train(directory, run, "--resume", **schedule | options)
    for one, content in before.items():
        assert (again / one).read_bytes() == content, one
