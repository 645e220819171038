"""`mindrlhf doctor --device cpu`: each rung for real, as one whole climb."""

import json
import os
from pathlib import Path

import pytest
from sanity_inputs import run
from slow_tests import SLOW

PYTHON = os.environ.get("MINDRLHF_ROLLOUT_PYTHON", str(Path(__file__).parents[2] / ".venv-rollout" / "bin" / "python"))
pytestmark = [
    SLOW,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="no rollout environment"),
]


def test_the_whole_ladder_holds_on_a_cpu_of_two_ranks(tmp_path):
    run("doctor", "--device", "cpu", "--npus", 2, "--output", tmp_path / "out", timeout_s=850)
    climbed = json.loads((tmp_path / "out" / "doctor.json").read_text())["rungs"]
    said = {one["name"]: one["status"] for one in climbed}
    assert said.pop("sleep") == "skipped"
    assert len(said) == 8 and set(said.values()) == {"ok"}
    found = {one["name"]: one["found"] for one in climbed}
    gaps = [*found["server"].values(), *found["hand-over"].values()]
    assert all(float(gap.partition("most ")[2]) < 1e-4 for gap in gaps)
    losses = found["same-numbers"]
    assert losses["losses here"] == pytest.approx(losses["losses on one CPU"], rel=1e-5)
