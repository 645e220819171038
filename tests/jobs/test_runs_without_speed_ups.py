"""A run from a copy of the package that lacks `mindrlhf/cpu`: msrun, two ranks and vLLM train, only slower."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from slow_tests import SLOW

import mindrlhf
from mindrlhf.system.speed_ups import MISSING

pytestmark = [pytest.mark.timeout(900), SLOW]

NUM_STEPS = 40
CPU = "cpu"


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The directory of a copy of the package without the speed-ups."""
    package = Path(mindrlhf.__file__).parent
    root = tmp_path_factory.mktemp("copy")

    def ignored(directory: str, names: list[str]) -> set[str]:
        return {"__pycache__", *([CPU] if Path(directory) == package else [])} & set(names)

    shutil.copytree(package, root / "mindrlhf", ignore=ignored)
    shutil.copytree(sanity_inputs.REPOSITORY / "examples" / "sanity", root / "examples" / "sanity")
    # An editable install would find the package of this repository.
    (root / "mindrlhf" / f"{CPU}.py").write_text('raise ImportError("the speed-ups were taken away")\n')
    return root


@pytest.fixture(scope="module")
def run(copy, tmp_path_factory, rollout_python):
    """What the run prints, and its output directory."""
    inputs, output = tmp_path_factory.mktemp("inputs"), tmp_path_factory.mktemp("run") / "run"
    sanity_inputs.make(inputs)
    sizes = {"algorithm__num_generations": 8, "training__micro_batch_size": 16, "optimizer__start_lr": 3e-3}
    recipe = sanity_inputs.overrides(inputs, output, run__max_steps=NUM_STEPS, rollout__python=rollout_python, **sizes)
    # The directory of the command comes first among the places of its packages, and of those of all that it starts.
    finished = subprocess.run(
        sanity_inputs.command("train", "examples/sanity/config.yaml", *recipe, "--workers", 2),
        cwd=copy,
        env={**sanity_inputs.environment(), "PYTHONPATH": os.fspath(copy)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout, output


def test_it_says_once_what_is_missing(run):
    stdout, _ = run
    assert stdout.splitlines().count(MISSING) == 1
    assert "kernels of matrix products: chosen by OpenBLAS" in stdout or "OPENBLAS_CORETYPE" in os.environ


def test_it_learns_from_samples_whose_log_probabilities_are_those_of_the_ranks(run):
    _, output = run
    metrics = sanity_inputs.read_lines(output / "metrics.jsonl")
    assert len(metrics) == NUM_STEPS
    assert max(step["rollout_diff/max_abs"] for step in metrics) < 1e-3
    rewards = [step["reward/mean"] for step in metrics]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2, rewards
    assert (output / "final" / "model.safetensors").exists()
