"""The cells of a teacher's top-k tokens compile for an NPU, kernels and memory included; nothing is computed."""

import subprocess
import sys
from pathlib import Path

import pytest
import sanity_inputs
from slow_tests import SLOW

from mindrlhf.layout.feasibility import can_compile

pytestmark = [pytest.mark.timeout(600), SLOW]


@pytest.mark.skipif(not can_compile(1), reason="Ascend can neither be used nor simulated here")
def test_update_and_teachers_pass_compile_for_an_npu(tmp_path):
    script = Path(__file__).with_name("top_k_compile.py")
    environment = {**sanity_inputs.environment(), "GLOG_v": "4", "PYTHONPATH": str(sanity_inputs.REPOSITORY)}
    finished = subprocess.run(
        [sys.executable, script],
        env=environment,
        cwd=tmp_path,  # MindSpore writes its order of kernels there
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    planned = [line.split() for line in finished.stdout.splitlines() if line.startswith(("whole", "tiled"))]
    assert [line[:2] for line in planned] == [
        [form, name] for form in ("whole", "tiled") for name in ("update", "logprobs", "tokens")
    ]
    assert all(int(line[2]) > 0 for line in planned)
