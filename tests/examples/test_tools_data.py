"""The data of examples/tools: every conversation that its script makes reaches the warm-up, turn markers as tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_builds_all_that_it_makes(tmp_path):
    """`run.sh` up to its first training, in a directory of its own."""
    for name in ("examples", "mindrlhf", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, command in (("python", ""), ("mindrlhf", "-m mindrlhf.cli")):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        program.chmod(0o755)
    script = (ROOT / "examples" / "tools" / "run.sh").read_text(encoding="utf-8")
    before, training, _ = script.partition(".venv/bin/mindrlhf sft")
    before = before.replace('cd "$(dirname "${BASH_SOURCE[0]}")/../.."\n', "")
    assert training and before.count("\nbuild ") == 3 and "cd " not in before
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        ["bash", "-c", before], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "escaped with a space" not in ran.stderr
    data = tmp_path / "runs" / "tools"
    for name in ("sft", "train", "test"):
        made = len((data / f"{name}.jsonl").read_text().splitlines())
        assert f"records    {made} kept of {made} read (0 too long, 0 bad)" in ran.stdout, name
    with_calls = [line for line in (data / "sft.jsonl").open() if "<tool_response>" in json.loads(line)["prompt"]]
    assert len(with_calls) > 500  # the turns after an answer, which are the longest
