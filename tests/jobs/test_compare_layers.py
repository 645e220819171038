"""`mindrlhf doctor --compare-layers`: vLLM's layers beside ours, and faults that are found at their layer."""

import os
from pathlib import Path

import numpy as np
import pytest
from layer_faults import FAULTS, check_each_is_found, write_model
from sanity_inputs import run
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.doctor.layers import distances
from mindrlhf.doctor.rungs import Ground

PYTHON = os.environ.get("MINDRLHF_ROLLOUT_PYTHON", str(Path(__file__).parents[2] / ".venv-rollout" / "bin" / "python"))


@pytest.mark.timeout(400)
@pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="no rollout environment")
def test_each_fault_is_found_at_its_layer(tmp_path):
    model, out = write_model(tmp_path / "model"), tmp_path / "out"
    ended = run("doctor", "--device", "cpu", "--compare-layers", model, "--output", out, timeout_s=300)
    assert "No layer is far." in ended.stdout, ended.stdout
    # By day one; test_fake_npu.py has all at night, too.
    faults = FAULTS[1:] if RUNS_SLOW_TESTS else FAULTS[1:2]
    check_each_is_found(Ground(str(out), "cpu", 1, PYTHON), model, faults)


def test_distances_are_shares_of_what_a_layer_adds():
    embedded = np.full((3, 4), 4.0, np.float32)
    server = {"embedding": embedded, "layer 0": embedded + 1, "norm": np.ones((3, 4), np.float32)}
    cells = server | {"layer 0": server["layer 0"] + np.array([[0], [0.5], [0.5]], np.float32)}
    found = {one.name: (one.median, one.largest) for one in distances(server, cells)}
    assert found["embedding"] == found["norm"] == (0, 0)
    assert found["layer 0"] == pytest.approx((1 / (2 + 10 / 16),) * 2), "norms of 1 in 2 + 10 / 16"
