"""Real runs of schedules with tools, environments, agents, images and what scores or drops samples, resumed."""

import json
import math
import shutil
from pathlib import Path

import pytest
import sanity_inputs
import test_agent_runs
import test_tool_runs
import test_train_experts
import test_vision_run
from example_tools import CALCULATOR
from slow_tests import SLOW

from mindrlhf.specs import scorer_config

pytestmark = [pytest.mark.timeout(1200), SLOW]

TIMEOUT_S = 500  # generous: other work may load the machine
NUM_STEPS = 4
SEGMENTS = {"rollout__segment_tokens": 8, "rollout__in_flight": 2}
LAG = {"rollout__off_policy_steps": 1}
ASYNCHRONOUS = {"rollout__segment_tokens": 8, "rollout__off_policy_steps": 2, "rollout__asynchronous": "true"}
CONVERSATIONS = {"rollout__max_response_length": test_tool_runs.MAX_LENGTH, "tools__max_response_tokens": 32}
AGENTS = {"rollout__max_response_length": 64, "tools__memory_limit_mib": 2048, "tools__agent_gather_s": 20}
# Two turns and a look from elsewhere; digits are rewarded.
AGENT = """
import json, urllib.request

def ask(url, key, messages, **more):
    data = json.dumps({"model": "policy", "messages": messages, "max_tokens": 20, **more}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", data, headers)) as response:
        return [one["message"] for one in json.loads(response.read())["choices"]]

def agent(record, url, key):
    messages = [{"role": "user", "content": record["prompt"]}]
    messages += ask(url, key, messages) + [{"role": "user", "content": "8"}]
    messages += ask(url, key, messages)
    messages += ask(url, key, [{"role": "user", "content": "7"}], n=2)
    text = "".join(one["content"] or "" for one in messages if one["role"] == "assistant")
    return {"reward": sum(letter.isdigit() for letter in text) / max(1, len(text)), "text": text}
"""
RUNS = {
    "tools by segments": ("tools", SEGMENTS | CONVERSATIONS | {"tools__names": CALCULATOR}),
    "tools asynchronously": ("tools", ASYNCHRONOUS | CONVERSATIONS | {"tools__names": CALCULATOR}),
    "an environment by segments, off-policy": ("environment", SEGMENTS | LAG | CONVERSATIONS),
    "an agent by segments": ("agent", SEGMENTS | AGENTS),
    "an agent asynchronously": ("agent", ASYNCHRONOUS | AGENTS),
    "images off-policy": ("images", LAG),
    "a reward model off-policy": ("reward model", LAG),
    "replayed routing by segments": ("experts", SEGMENTS | {"training__replay_routing": "true"}),
    "dynamic sampling by segments": ("sanity", SEGMENTS | {"algorithm__dynamic_sampling": "true"}),
    "dynamic sampling asynchronously": ("sanity", ASYNCHRONOUS | {"algorithm__dynamic_sampling": "true"}),
}


def make_agent(directory: Path) -> None:
    """Write the agent, and inputs whose tokenizer has a chat template."""
    test_tool_runs.make(directory)
    (directory / "agent.py").write_text(AGENT)
    for name in ("bare", "model"):
        config = {"eos_token": "<|endoftext|>", "chat_template": test_agent_runs.TEMPLATE}
        (directory / name / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def inputs(rollout_python, tmp_path_factory):
    """Return the directory of inputs of a kind, and the options that go with it."""
    made: dict[str, Path] = {}

    def make(kind: str, directory: Path) -> None:
        if kind in ("tools", "environment"):
            test_tool_runs.make(directory)
            (directory / "digits.py").write_text(test_tool_runs.ENVIRONMENT)
        elif kind == "agent":
            make_agent(directory)
        elif kind == "images":
            test_vision_run.write_inputs(directory, test_vision_run.MODEL)
        else:
            sanity_inputs.make(directory)
            config = json.loads((directory / "model" / "config.json").read_text())
            for name, changed in (("scorer", scorer_config(config)), ("experts", config | test_train_experts.EXPERTS)):
                (directory / f"{name}.json").write_text(json.dumps(changed))
                arguments = ("--config", directory / f"{name}.json", "--tokenizer", directory / "model")
                options = ("--output", directory / name)
                sanity_inputs.run("weights", "random", *arguments, *options, timeout_s=300)

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
            "agent": {
                "tools__agent": f"{directory / 'agent.py'}:agent",
                "reward__verifier_function": "environment_reward",
            },
            "images": {"training__chunk_size": 3, "optimizer__start_lr": 1e-3},
            "reward model": {"reward__model_path": directory / "scorer"},
            "experts": {"model__path": directory / "experts"},
        }
        return directory, options.get(kind, {})

    return find


def train(directory: Path, output_dir: Path, *options: object, **more: object) -> None:
    settings = {"run__max_steps": NUM_STEPS, "training__epochs": 50}
    settings |= {"checkpoint__every_steps": 1, "checkpoint__keep_last": 10, "observe__sinks": "[]"}
    sanity_inputs.train(directory, output_dir, *options, timeout_s=TIMEOUT_S, **settings | more)


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
    if kind == "agent":
        for line in lines:
            assert line["agents/failures"] == line["agents/refused"] == line["agents/rewritten"] == 0
            assert line["agents/sequences"] == 3 and line["turns/mean"] == 4
        assert max(line["segments/max"] for line in lines) > 1, "episodes go on with other weights"
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
