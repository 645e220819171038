"""Ranks that divide the update end with the bits of ranks that each make all of it, and so do resumed ones.

Runs of `mindrlhf sft`: no generator, so that a job is short.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from slow_tests import SLOW

from mindrlhf.weights.array_file import load_arrays

pytestmark = [pytest.mark.timeout(900), SLOW]

NUM_STEPS, SAVED = 4, 2
NO_SHARED_MEMORY = "gradients are summed by collectives, and every rank keeps all moments: no "


@pytest.fixture(scope="module")
def train(pairs_dir, tmp_path_factory):
    """Run to a step on some ranks: ``train(output_dir, num_ranks, num_steps, options...)``; returns what it printed."""

    def run(output_dir: Path, num_ranks: int, num_steps: int, *options: str) -> str:
        config = {
            "model": {"path": str(pairs_dir / "model")},
            "data": {"train_file": str(pairs_dir / "sft.mindrecord"), "tokenizer_dir": str(pairs_dir / "model")},
            "run": {"output_dir": str(output_dir), "max_steps": num_steps},
            "optimizer": {"start_lr": 1e-3},
            "checkpoint": {"every_steps": SAVED, "keep_last": 9},
            "observe": {"sinks": []},
            "supervised": {"rows_per_step": 8, "micro_batch_size": 2, "sequence_lengths": [32], "epochs": 80},
        }
        path = tmp_path_factory.mktemp("sft") / "sft.yaml"  # YAML is a superset of JSON
        path.write_text(json.dumps(config))
        finished = sanity_inputs.run("sft", path, "--workers", num_ranks, *options, timeout_s=400)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    return run


@pytest.fixture(scope="module")
def divided(train, tmp_path_factory) -> Path:
    """The output directory of a run on two ranks."""
    output_dir = tmp_path_factory.mktemp("divided") / "run"
    assert NO_SHARED_MEMORY not in train(output_dir, 2, NUM_STEPS)
    return output_dir


def saved(output_dir: Path, step: int = NUM_STEPS) -> dict[str, np.ndarray]:
    """Return weights and optimiser state of a checkpoint."""
    directory = output_dir / "checkpoints" / f"step_{step:08d}"
    (weights,) = (directory / "model").glob("*.safetensors")
    return {**load_arrays(weights), **load_arrays(directory / "optimizer.safetensors")}


def broken_off(output_dir: Path, target: Path) -> Path:
    """Copy a run as it was after its first checkpoint."""
    shutil.copytree(output_dir, target)
    shutil.rmtree(target / "final")
    for path in (target / "checkpoints").iterdir():
        if path.name > f"step_{SAVED:08d}":
            shutil.rmtree(path)
    return target


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_two_ranks_end_with_the_bits_of_collectives(divided, train, tmp_path, monkeypatch):
    sanity_inputs.sum_by_collectives(tmp_path, monkeypatch)
    assert NO_SHARED_MEMORY in train(tmp_path / "run", 2, NUM_STEPS)
    state = saved(divided)
    assert_same_bits(saved(tmp_path / "run"), state)
    moments = [array for name, array in state.items() if name.startswith("exp_avg_sq.")]
    assert moments and all((array > 0).any() for array in moments), "moments of the other rank are missing"


def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(divided, train, tmp_path):
    resumed = broken_off(divided, tmp_path / "run")
    train(resumed, 2, NUM_STEPS, "--resume")
    assert_same_bits(saved(resumed), saved(divided))


def test_the_state_of_two_ranks_goes_on_with_one_and_with_four(divided, train, tmp_path):
    """The sums of gradients round differently, so the last bits may; the state that is taken over does not change."""
    changed = broken_off(divided, tmp_path / "run")
    train(changed, 1, SAVED + 1, "--resume")
    shutil.rmtree(changed / "final")
    train(changed, 4, NUM_STEPS, "--resume")
    found, expected = saved(changed), saved(divided)
    assert found.keys() == expected.keys()
    assert found["global_step"] == expected["global_step"] == NUM_STEPS
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=2e-5, err_msg=name)
