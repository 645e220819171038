"""`mindrlhf diff` finds runs of one seed the same, to the last bit, and tells one with another seed from them."""

import pytest
import sanity_inputs
from fault_jobs import NUM_STEPS
from slow_tests import RUNS_SLOW_TESTS

pytestmark = pytest.mark.timeout(1500)

TIMEOUT_S = 400  # generous: other work may load the machine


def test_runs_of_one_seed_are_the_same_and_another_seed_is_named(start_job, undisturbed_run, tmp_path):
    one, other, strange = undisturbed_run(1), tmp_path / "other", tmp_path / "strange"
    if RUNS_SLOW_TESTS:  # every day a run is the same after all faults in test_fault_matrix.py
        job = start_job(other)
        assert job.wait(TIMEOUT_S) == 0, job.text()
        same = sanity_inputs.run("diff", one, other, timeout_s=120)
        assert (same.returncode, same.stdout) == (0, f"the same up to step {NUM_STEPS}\n"), same.stdout + same.stderr
        # Said without the command: everything written is the same, byte for byte.
        for name in ("trajectory.jsonl", "samples.jsonl", "final/model.safetensors"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
    lines = sanity_inputs.read_lines(one / "trajectory.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert len({line["weights"] for line in lines}) == NUM_STEPS + 1, "every step changes the weights"
    metrics = sanity_inputs.read_lines(one / "metrics.jsonl")
    assert [line["loss"] for line in metrics if line["step"]] == [line["loss"] for line in lines[1:]]
    assert {line["guard/skipped_updates"] for line in metrics if line["step"]} == {0}

    job = start_job(strange, run__seed=2)
    assert job.wait(TIMEOUT_S) == 0, job.text()
    different = sanity_inputs.run("diff", one, strange, timeout_s=120)
    assert different.returncode == 1, different.stderr
    first, *details = different.stdout.splitlines()
    # Both begin with the same weights; the seed shuffles the prompts.
    assert first == "step 1: prompts differ first"
    assert any(line.startswith("  sample 1 of step 1, ") for line in details)
    assert any("checkpoints/step_00000007/model, " in line and "differ by up to" in line for line in details)
    assert "  config run.seed: 0 and 2" in details
