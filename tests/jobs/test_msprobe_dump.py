"""Two runs of other learning rates that dump the kernels of a step, and msprobe's own comparison of the two."""

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sanity_inputs
from slow_tests import SLOW

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("msprobe") is None, reason="the debug extra is not installed"),
    SLOW,
]


def test_the_kernels_of_a_step_are_dumped_and_compared(tmp_path, rollout_python):
    sanity_inputs.make(tmp_path)
    (tmp_path / "msprobe.json").write_text(
        json.dumps({"task": "tensor", "level": "L2", "dump_path": "unread", "step": [1], "tensor": {"list": []}})
    )
    for name, lr in (("a", 1e-4), ("b", 2e-4)):
        options = {"run__max_steps": 2, "msprobe__config_path": tmp_path / "msprobe.json", "optimizer__start_lr": lr}
        sanity_inputs.train(tmp_path, tmp_path / name, timeout_s=400, **options)
        steps = {path.parent.name for path in (tmp_path / name / "dump").rglob("MatMul*.npy")}
        assert steps == {"1"}, "of the second step, and of no other"
    errors = compare(tmp_path)
    assert len(errors) > 100 and max(errors) > 0  # the first update of the two had another learning rate


def compare(directory: Path) -> list[float]:
    """The largest absolute error of each line of msprobe's table that has one."""
    out = directory / "errors"
    command = [Path(sys.executable).with_name("msprobe"), "compare", "-tp", directory / "a" / "dump"]
    command += ["-gp", directory / "b" / "dump", "--rank", "0", "-o", out]
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    subprocess.run(command, check=True, timeout=300, capture_output=True, env=environment)
    (table,) = out.glob("compare_result_0_1_*.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    return [float(row["MaxAbsErr"]) for row in rows if row["MaxAbsErr"] and row["NPU Dtype"] == "float32"]
