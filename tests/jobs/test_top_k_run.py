"""Distillation from a teacher's top-k tokens as a run of two ranks: it learns, and is resumed bit for bit."""

import json
import math
from pathlib import Path

import pytest
import sanity_inputs
from slow_tests import SLOW

pytestmark = pytest.mark.timeout(900)

NUM_STEPS, K = 20, 32
OPTIONS = {
    "algorithm__name": "distill",
    "algorithm__distill_top_k": K,
    "run__max_steps": NUM_STEPS,
    "training__micro_batch_size": 4,
    "training__chunk_size": 8,
    "optimizer__start_lr": 3e-3,
}


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory, rollout_python) -> Path:
    """The inputs of other runs, and a teacher of other weights."""
    directory = tmp_path_factory.mktemp("inputs")
    sanity_inputs.make(directory)
    options = ("--config", directory / "bare" / "config.json", "--tokenizer-dir", directory / "bare", "--seed", 5)
    finished = sanity_inputs.run("weights", "random", *options, "--out", directory / "teacher", timeout_s=200)
    assert finished.returncode == 0, finished.stderr
    return directory


@pytest.fixture(scope="module")
def train(inputs_dir):
    def one(directory, *options, **more):
        values = {**OPTIONS, "model__reference_path": inputs_dir / "teacher", **more}
        finished = sanity_inputs.train(inputs_dir, directory, *options, timeout_s=600, **values)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return sanity_inputs.read_lines(directory / "metrics.jsonl")

    return one


@pytest.fixture(scope="module")
def uninterrupted(train, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, train(directory, "--workers", 2)


def test_it_learns_the_teachers_distributions(uninterrupted):
    _, metrics = uninterrupted
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    kl = [line["distill/topk_kl"] for line in metrics]
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])
    # The teacher is sure of its tokens: the student learns to choose among them.
    assert metrics[-1]["distill/student_mass"] > metrics[0]["distill/student_mass"]
    for line in metrics:
        assert line["loss"] == pytest.approx(line["distill/topk_kl"], rel=1e-5)  # beta is 1, and rewards teach nothing
        assert 0 < line["distill/teacher_mass"] <= 1 and 0 < line["distill/student_mass"] <= 1
        assert math.isfinite(line["kl"]) and "timing/old_log_p" not in line


@SLOW
def test_a_run_that_is_resumed_ends_as_one_that_was_not(train, uninterrupted, tmp_path):
    directory, _ = uninterrupted
    resumed = tmp_path / "run"
    train(resumed, "--workers", 2, run__max_steps=5, checkpoint__every_steps=5)
    (resumed / "final").rename(tmp_path / "final_of_five_steps")
    train(resumed, "--workers", 2, "--resume", checkpoint__every_steps=5)
    course = [[json.loads(line)["hash"] for line in (one / "trajectory.jsonl").open()] for one in (directory, resumed)]
    assert len(course[0]) == NUM_STEPS + 1 and course[0] == course[1]
    weights = [(one / "final" / "model.safetensors").read_bytes() for one in (directory, resumed)]
    assert weights[0] == weights[1]
