"""Whole runs by the schedules of sampling: in step, off-policy, partial rollout, in turns, a pair for each seed.

Responses of examples/long_tail, whose lengths vary a lot, where its inputs are there (`bash
examples/long_tail/make_model.sh`); with --smallest those of examples/sanity.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT, make_sanity, mindrlhf, run, train

from mindrlhf.observe.records import read_jsonl

LONG_TAIL = "examples/long_tail/config.yaml"
SCHEDULES = {
    "in step": [],
    "off-policy": ["rollout.off_policy_steps=1"],
    "segments": ["rollout.segment_tokens=64", "rollout.in_flight=3", "rollout.max_segments=13"],
}
WARM_UP = 5


def measure(directory: Path, smallest: bool, repeats: int) -> Iterator[dict]:
    if smallest:
        make_sanity(directory)
        for name, keys in {"in step": {}, "off-policy": {"rollout__off_policy_steps": 1}}.items():
            yield _row(name, 0, train(directory, directory / name.replace(" ", "_"), 3, warm_up=2, **keys))
        return
    if not (ROOT / "runs/long_tail").is_dir():
        raise SystemExit("benchmark: there are no prompts in runs/long_tail: bash examples/long_tail/make_model.sh")
    for seed in range(repeats):
        for name, keys in list(SCHEDULES.items())[:: 1 if seed % 2 == 0 else -1]:
            output = directory / f"{name.replace(' ', '_')}_{seed}"
            words = [*keys, f"run.output_dir={output}", f"run.seed={seed}", "checkpoint.every_steps=0"]
            run(mindrlhf("train", LONG_TAIL, *words, "observe.sinks=[]"))
            steps = [record for record in read_jsonl(output / "metrics.jsonl") if "timing/all" in record]
            accuracy = json.loads((output / "summary.json").read_text(encoding="utf-8"))["after"]
            yield {**_row(name, seed, steps[WARM_UP:]), **{key: accuracy[key] for key in ("accuracy", "low", "high")}}


def _row(name: str, seed: int, steps: list[dict]) -> dict:
    seconds = sum(step["timing/all"] for step in steps)
    waiting_s = sum(step.get("timing/rollout", step.get("timing/rollout_wait", 0.0)) for step in steps)
    return {"schedule": name, "seed": seed, "steps": len(steps), "all s": seconds, "waiting s": waiting_s}
