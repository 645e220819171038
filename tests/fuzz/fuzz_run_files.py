"""What a run leaves for other commands, and completions to be scored."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import corruption
from fuzz_target import Case

STEPS = [
    {"step": step, "reward/mean": 0.1 * step, "timing/all": 2.0, "timing/rollout": 1.5, "eval/accuracy": None}
    for step in range(1, 4)
]
SAMPLES = [
    {
        "step": step,
        "prompt": f"{step} + 1?",
        "completion": "2",
        "answer": "2",
        "reward": 1.0,
        "rewards": {"accuracy": 1.0},
    }
    for step in range(1, 4)
]
COURSE = [
    {"step": step, "samples": "ab" * 8, "loss": 0.5, "weights": "cd" * 8, "hash": "ef" * 8} for step in range(1, 4)
]
INTERVAL = {"low": -0.1, "high": 0.9, "accuracy": 0.5, "mean": 0.5}
SUMMARY = {
    "num_prompts": 4,
    **dict.fromkeys(("before", "after", "difference"), INTERVAL),
    **dict.fromkeys(("samples_before", "samples_after"), [{"prompt": "q", "completion": "c", "reward": 1.0}]),
}


def _lines(rng: random.Random, records: list[dict[str, Any]]) -> bytes:
    """Return JSON lines of which one is damaged, or all bytes."""
    lines = [json.dumps(record).encode() for record in records]
    if rng.randrange(3) == 0:
        return corruption.corrupt_bytes(rng, b"\n".join(lines) + b"\n")
    chosen = rng.randrange(len(lines))
    lines[chosen] = corruption.corrupt_json(rng, records[chosen])
    return b"\n".join(lines) + b"\n"


def run_records(directory: Path) -> Case:
    from mindrlhf.debugging.run_diff import compare_runs
    from mindrlhf.observe.report import render_report
    from mindrlhf.observe.run_data import read_run

    files: Mapping[str, list] = {"metrics.jsonl": STEPS, "samples.jsonl": SAMPLES, "trajectory.jsonl": COURSE}
    run, other = directory / "run", directory / "other"
    for run_dir in (run, other):
        run_dir.mkdir()
        for name, records in files.items():
            (run_dir / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        (run_dir / "summary.json").write_text(json.dumps(SUMMARY))
    texts = {path.name: path.read_bytes() for path in run.iterdir()}

    def case(rng: random.Random) -> None:
        name = rng.choice(list(texts))
        damaged = corruption.corrupt_json(rng, SUMMARY) if name == "summary.json" else _lines(rng, files[name])
        (run / name).write_bytes(damaged)
        try:
            if name == "trajectory.jsonl":
                compare_runs(run, other)
            else:
                data = read_run(run)
                if rng.randrange(8) == 0:  # a page costs many times what the reading does
                    render_report([data]).encode(errors="replace")
        finally:
            (run / name).write_bytes(texts[name])

    return case


def samples_to_score(directory: Path) -> Case:
    from mindrlhf.errors import UserError
    from mindrlhf.rewards.sample_files import read_samples, scored_record
    from mindrlhf.rewards.types import RewardResult

    path = directory / "samples.jsonl"
    samples = [
        {"completion": "7", "answer": 7, "prompt": "3 + 4?", "finish_reason": "stop", "num_tokens": 2, "id": [1]},
        {"completion": "x", "answer": "y"},
    ]

    def case(rng: random.Random) -> None:
        path.write_bytes(_lines(rng, samples))
        for line in read_samples(path):
            if isinstance(line, UserError):
                raise line
            json.dumps(scored_record(line, RewardResult(line.number, {"accuracy": 1.0}, 1.0)))

    return case
