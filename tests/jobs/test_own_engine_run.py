"""A run whose rollout server samples with an engine of one's own, the example's."""

import sanity_inputs
from slow_tests import SLOW

pytestmark = SLOW

ENGINE = "examples/engine/transformers_engine.py:TransformersEngine"


def test_a_run_samples_and_learns_with_another_engine(tmp_path, rollout_python):
    sanity_inputs.make(tmp_path)
    output = tmp_path / "run"
    finished = sanity_inputs.train(tmp_path, output, timeout_s=400, run__max_steps=3, rollout__engine=ENGINE)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    metrics = sanity_inputs.read_lines(output / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    # Tokens and log-probabilities of new weights in each step, which the trainer computes again.
    assert all(line["rollout_diff/max_abs"] < 1e-4 for line in metrics)
    assert (output / "final" / "model.safetensors").read_bytes() != (tmp_path / "model/model.safetensors").read_bytes()
    assert "vllm" not in (output / "logs" / "rollout_0.log").read_text().lower()
