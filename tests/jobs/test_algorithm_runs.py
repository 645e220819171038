"""Whole runs of algorithms that use other parts than plain GRPO; test_train_ranks has that."""

import math

import pytest
import sanity_inputs
from slow_tests import SLOW

pytestmark = [pytest.mark.timeout(400), SLOW]

NUM_STEPS = 3
TWO_UPDATES = {"training__num_minibatches": 2}
# Preset -> what to add so that every part of it takes part, and metrics that it must report.
RUNS = {
    "reinforce_pp": ({"algorithm__beta": 0.05}, ("kl",)),
    "remax": ({"algorithm__beta": 0.05}, ("kl", "reward/greedy")),
    "gspo": ({**TWO_UPDATES, "correction__weight": "sequence"}, ("correction/weight", "correction/changed")),
    "rloo": ({**TWO_UPDATES, "algorithm__beta": 0.05, "algorithm__kl_target": 0.01}, ("kl", "kl_coefficient")),
    "dapo": ({}, ()),
}


@pytest.mark.parametrize("preset", RUNS)
def test_a_short_run_ends_with_finite_numbers(sanity_dir, tmp_path, preset):
    options, reported = RUNS[preset]
    sanity_inputs.train(
        sanity_dir,
        tmp_path / "run",
        timeout_s=300,
        run__max_steps=NUM_STEPS,
        algorithm__name=preset,
        **options,
    )
    metrics = sanity_inputs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        numbers = [value for value in line.values() if isinstance(value, float)]
        assert all(map(math.isfinite, numbers)), line
        assert set(reported) <= line.keys()
        assert line["grad_norm"] > 0
        # On a CPU generator and trainer agree, whatever the algorithm.
        assert line["rollout_diff/max_abs"] < 1e-4
        assert line["rollout_ratio/effective"] == pytest.approx(1.0, abs=1e-6)
        assert line.get("correction/weight", 1.0) == pytest.approx(1.0, abs=1e-3)
        if "training__num_minibatches" not in options:
            assert line["clip_fraction/low"] == line["clip_fraction/high"] == 0
