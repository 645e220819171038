"""Two runs of one config are the same to the last bit; one with another seed is told from them."""

from pathlib import Path

import pytest
import sanity_inputs

pytestmark = pytest.mark.timeout(1500)

TIMEOUT_S = 400  # generous: other work may load the machine
RECIPE = {
    "run__max_steps": 3,
    "training__num_minibatches": 2,
    "checkpoint__every_steps": 2,
    "observe__samples_per_step": 16,
    "observe__tensorboard": "false",
}


@pytest.fixture(scope="module")
def train(tmp_path_factory, rollout_python):
    inputs_dir = tmp_path_factory.mktemp("inputs")
    sanity_inputs.make(inputs_dir)

    def run(name: str, seed: int) -> Path:
        output_dir = tmp_path_factory.mktemp(name) / "run"
        ended = sanity_inputs.train(inputs_dir, output_dir, timeout_s=TIMEOUT_S, run__seed=seed, **RECIPE)
        assert ended.returncode == 0, ended.stderr
        return output_dir

    return run


def test_runs_of_one_seed_are_the_same_and_another_seed_is_named(train):
    one, other, strange = train("one", 1), train("other", 1), train("strange", 2)
    same = sanity_inputs.run("diff", one, other, timeout_s=120)
    assert (same.returncode, same.stdout) == (0, "the same up to step 3\n"), same.stdout + same.stderr
    # Said without the command: everything written is the same, byte for byte.
    for name in ("trajectory.jsonl", "samples.jsonl", "final/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    lines = sanity_inputs.read_lines(one / "trajectory.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert len({line["weights"] for line in lines}) == 4, "every step changes the weights"
    metrics = sanity_inputs.read_lines(one / "metrics.jsonl")
    assert [line["loss"] for line in metrics if line["step"]] == [line["loss"] for line in lines[1:]]
    assert {line["guard/skipped_updates"] for line in metrics if line["step"]} == {0}

    different = sanity_inputs.run("diff", one, strange, timeout_s=120)
    assert different.returncode == 1, different.stderr
    first, *details = different.stdout.splitlines()
    # Both begin with the same weights; the seed shuffles the prompts.
    assert first == "step 1: prompts differ first"
    assert any(line.startswith("  sample 1 of step 1, ") for line in details)
    assert any("checkpoints/step_00000002/model, " in line and "differ by up to" in line for line in details)
    assert "  config run.seed: 1 and 2" in details
