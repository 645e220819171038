"""Examples that take the parts in their own hands: a rollout engine, and a loop in one file."""

import re
import subprocess
import sys

import sanity_inputs
from slow_tests import SLOW

pytestmark = SLOW

ENGINE = "examples/engine/transformers_engine.py:TransformersEngine"


def test_a_run_samples_and_learns_with_another_engine(tmp_path, rollout_python):
    sanity_inputs.make(tmp_path)
    output = tmp_path / "run"
    sanity_inputs.train(tmp_path, output, timeout_s=400, run__max_steps=3, rollout__engine=ENGINE)
    metrics = sanity_inputs.read_lines(output / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    # Tokens and log-probabilities of new weights in each step, which the trainer computes again.
    assert all(line["rollout_diff/max_abs"] < 1e-4 for line in metrics)
    assert (output / "final" / "model.safetensors").read_bytes() != (tmp_path / "model/model.safetensors").read_bytes()
    assert "vllm" not in (output / "logs" / "rollout_0.log").read_text().lower()


def test_the_loop_in_one_file_learns(tmp_path, rollout_python):
    for name in (".venv", "examples"):
        (tmp_path / name).symlink_to(sanity_inputs.REPOSITORY / name)
    options = {"cwd": tmp_path, "env": sanity_inputs.environment(), "capture_output": True, "text": True}
    subprocess.run(["bash", "examples/quickstart/make_data.sh"], check=True, timeout=300, **options)
    loop = subprocess.run([sys.executable, "examples/loop/grpo.py", "--steps", "12"], timeout=900, **options)
    assert loop.returncode == 0, loop.stdout + loop.stderr
    before, after = (float(share) for share in re.findall(r"held-out accuracy ([0-9.]+)%", loop.stdout))
    assert after > before + 10  # of 150 problems, from 34: three standard errors
    first = re.findall(r"pi_old\| (\S+),", loop.stdout)
    assert len(first) == 12 and max(map(float, first)) < 1e-4
