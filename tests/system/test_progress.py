"""n of N in the signs of life of commands that take long."""

import io
import json
import threading
import time
from pathlib import Path

import pytest

from mindrlhf.cli import main
from mindrlhf.launch.stages import signs_of_life
from mindrlhf.system import progress
from mindrlhf.system.progress import counted, watched


def test_counts_grow_nest_and_end():
    seen = []
    for _ in counted([1, 2], 2, "ranks"):
        for _ in counted("ab", 2, "tensors"):
            seen.append(progress.now())
    assert seen[0] == "0 of 2 ranks, 0 of 2 tensors" and seen[-1] == "1 of 2 ranks, 1 of 2 tensors"
    assert progress.now() == ""
    with pytest.raises(ValueError):
        for _ in counted(range(9), 9, "x"):
            raise ValueError
    assert progress.now() == ""


def test_signs_of_life_say_how_far():
    out, said = io.StringIO(), threading.Event()
    with signs_of_life("merging", out, limit_s=0.05), watched(lambda: 3, 1200, "tensors"):
        end_s = time.monotonic() + 20
        while "1,200" not in out.getvalue() and time.monotonic() < end_s:
            said.wait(0.02)
    assert out.getvalue().splitlines()[0] == "mindrlhf: merging, 3 of 1,200 tensors, for 0 s"


@pytest.mark.parametrize("command", ["shard", "merge", "convert"])
def test_commands_on_weights_count(command, tmp_path, monkeypatch):
    totals = []
    real = progress.watched
    monkeypatch.setattr(
        progress, "watched", lambda count, total, unit: totals.append((total, unit)) or real(count, total, unit)
    )
    model, shards = "examples/quickstart/checkpoint", str(tmp_path / "shards")
    if command != "convert":
        assert main(["weights", "shard", model, "--parallel", "dp=1,mp=2", "--output", shards]) == 0
    if command == "merge":
        totals.clear()
        assert main(["weights", "merge", shards, "--output", str(tmp_path / "merged")]) == 0
    if command == "convert":
        assert main(["weights", "convert", model, "--dtype", "bfloat16", "--output", str(tmp_path / "out")]) == 0
    layers = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    assert totals and all(total >= layers for total, _ in totals)
