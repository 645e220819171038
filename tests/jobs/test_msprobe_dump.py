"""A run with the real generator that dumps: the files agree with what the run reports, and msprobe opens them."""

import csv
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from slow_tests import SLOW

from mindrlhf.debugging.dump_paths import rank_dir, rank_dirs

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("msprobe") is None, reason="the debug extra is not installed"),
    SLOW,  # what is dumped is tested every day without a run
]

TIMEOUT_S = 400  # generous: other work may load the machine
RECIPE = {
    "run__max_steps": 2,
    "training__num_minibatches": 2,
    "observe__samples_per_step": 16,
    "observe__tensorboard": "false",
    "msprobe__enabled": "true",
    "msprobe__first_step": 2,
    "msprobe__last_step": 2,
    "msprobe__level": "L0",
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, rollout_python) -> Path:
    inputs_dir = tmp_path_factory.mktemp("inputs")
    sanity_inputs.make(inputs_dir)
    output_dir = tmp_path_factory.mktemp("out") / "run"
    ended = sanity_inputs.train(inputs_dir, output_dir, timeout_s=TIMEOUT_S, **RECIPE)
    assert ended.returncode == 0, ended.stderr
    return output_dir


def read(run_dir: Path, stage: str, name: str) -> dict:
    return json.loads((rank_dir(run_dir / "dump", stage, 2, 0) / name).read_text())["data"]


def test_the_dump_agrees_with_what_the_run_reports(run_dir):
    stages = {place[1] for place in rank_dirs(run_dir / "dump")}
    assert {"rollout", "old_log_prob", "update"} <= stages and {place[0] for place in rank_dirs(run_dir / "dump")} == {
        2
    }
    samples = [line for line in sanity_inputs.read_lines(run_dir / "samples.jsonl") if line["step"] == 2]
    rollout = read(run_dir, "rollout", "debug.json")
    assert [leaf["value"] for leaf in rollout["responses.0.debug"]] == [sample["completion"] for sample in samples]
    assert rollout["reward.0.debug"]["Mean"] == pytest.approx(np.mean([sample["reward"] for sample in samples]))
    (metrics,) = [line for line in sanity_inputs.read_lines(run_dir / "metrics.jsonl") if line["step"] == 2]
    update = read(run_dir, "update", "debug.json")
    assert np.mean([update[f"loss.{index}.debug"]["Mean"] for index in range(2)]) == pytest.approx(metrics["loss"])
    norms = [update[f"grad_norm.{index}.debug"]["Mean"] for index in range(2)]
    assert np.mean(norms) == pytest.approx(metrics["grad_norm"])
    cells = read(run_dir, "update", "dump.json")
    for index, norm in enumerate(norms):
        gradients = [
            leaf["Norm"]
            for name, entry in cells.items()
            if name.endswith(f".parameters_grad.{index}")
            for (leaf,) in entry.values()
        ]
        assert np.sqrt(np.sum(np.square(gradients))) == pytest.approx(norm, rel=1e-4)


def test_msprobe_compares_a_dump_with_a_changed_one(run_dir, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(run_dir / "dump", changed)
    path = rank_dir(changed, "update", 2, 0) / "dump.json"
    content = json.loads(path.read_text())
    name = next(name for name in content["data"] if "final_layernorm.RmsNorm.forward.0" in name)
    content["data"][name]["output"][0]["Max"] += 1.0
    path.write_text(json.dumps(content))

    diff = sanity_inputs.run("diff", run_dir / "dump", changed, timeout_s=120)
    assert diff.returncode == 1, diff.stderr
    assert diff.stdout.startswith(f"dump: step 2, update, rank 0: {name}.output.0 differs first\n")

    msprobe = Path(sys.executable).with_name("msprobe")
    places = [str(directory / "update" / "step2") for directory in (changed, run_dir / "dump")]
    command = [msprobe, "compare", "-tp", places[0], "-gp", places[1], "-o", str(tmp_path / "errors")]
    # msprobe loads MindSpore too late; see docs/debugging.md.
    environment = {**sanity_inputs.environment(), "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (table,) = (tmp_path / "errors").glob("compare_result*.csv")
    with open(table, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    different = [row for row in rows if row["Max diff"] not in ("0.0", "0", "N/A", "")]
    assert [row["NPU Name"] for row in different] == [f"{name}.output.0"]
    assert float(different[0]["Max diff"]) == pytest.approx(1.0)
    assert len(rows) > len(content["data"])
