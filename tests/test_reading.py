"""The list of what one step of GRPO makes one read."""

from pathlib import Path

import reading

ROOT = Path(__file__).parents[1]


def test_a_step_reaches_all_processes_and_leaves_out_what_it_says():
    assert [name for name in (*reading.STEP, *reading.LEFT_OUT) if reading.file_of(name) is None] == []
    step = reading.closure(reading.STEP)
    reached = {"mindrlhf.training.loop.objective", "mindrlhf.training.team", "mindrlhf.models.causal_lm"}
    assert reached <= set(step)
    assert not any(module.startswith("mindrlhf.config") for module in step)
    file = ROOT / "mindrlhf" / "training" / "loop" / "trainer.py"
    assert step["mindrlhf.training.loop.trainer"] == file.read_bytes().count(b"\n")
