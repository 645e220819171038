"""Where a dump keeps what, and in which order a step computes it."""

import re
from pathlib import Path

from mindrlhf.config.observe import STAGES

DEFAULT_NAME = "dump"  # in the run's output directory
# File names as msprobe has them.
DEBUG_NAME, CELLS_NAME, CONSTRUCT_NAME, STACK_NAME = "debug.json", "dump.json", "construct.json", "stack.json"
TENSORS_NAME = "dump_tensor_data"
# Arrays of the update that it computes itself, after its cells; the rest of its arrays goes into them.
UPDATE_RESULTS = ("logprobs", "loss", "grad_norm")

_STEP, _RANK = re.compile(r"step(\d+)"), re.compile(r"rank(\d+)")


def rank_dir(dump_dir: Path, stage: str, step: int, rank: int) -> Path:
    """Return the directory of one rank's part of a stage of a step (from 1)."""
    assert stage in STAGES, f"unknown stage {stage!r}"
    return Path(dump_dir) / stage / f"step{step}" / f"rank{rank}"


def rank_dirs(dump_dir: Path) -> dict[tuple[int, str, int], Path]:
    """Return the directories of a dump by step, stage and rank, in the order in which they were computed."""
    found = {}
    for number, stage in enumerate(STAGES):
        for path in Path(dump_dir).glob(f"{stage}/step*/rank*"):
            step, rank = _STEP.fullmatch(path.parent.name), _RANK.fullmatch(path.name)
            if step and rank and any((path / name).is_file() for name in (DEBUG_NAME, CELLS_NAME)):
                found[int(step[1]), number, int(rank[1])] = path
    return {(step, STAGES[number], rank): found[step, number, rank] for step, number, rank in sorted(found)}
