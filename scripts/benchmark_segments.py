"""Seconds of a whole run with partial rollout, against the same run that finishes all responses in their step.

    bash examples/long_tail/make_model.sh
    .venv/bin/python scripts/benchmark_segments.py examples/long_tail/config.yaml [section.key=value ...]
        [--segment-tokens 64] [--in-flight 3] [--max-segments 13] [--seeds 0 1 2] [--warmup 5] [--out figures.json]

Steps of partial rollout differ from each other, quick prompts come early and long ones late, so whole runs are
compared: both train on the same prompts, and the seconds of all steps after warm-up count, evaluations not. The sides
take turns, a pair of runs for each seed, one thread for each process; held-out accuracy is that of the run's end, with
its 95 % interval.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark import run

from mindrlhf.config.load import load_grpo_config
from mindrlhf.observe.records import read_jsonl


@dataclass(frozen=True)
class WholeRun:
    """Seconds of the steps and of their generation, tokens of all responses, held-out accuracy from 0 to 1."""

    steps_s: float
    generation_s: float
    num_tokens: int
    accuracy: tuple[float, float, float]  # mean, and the ends of its interval


def measure(config: str, overrides: list[str], num_warmup_steps: int) -> WholeRun:
    """Run `mindrlhf train` and read its own figures."""
    with tempfile.TemporaryDirectory() as directory:
        own = [f"run.output_dir={directory}", "checkpoint.every_steps=0", "observe.tensorboard=false"]
        run([sys.executable, "-m", "mindrlhf.cli", "train", config, *overrides, *own])
        records = list(read_jsonl(Path(directory) / "metrics.jsonl"))
        summary = json.loads((Path(directory) / "summary.json").read_text(encoding="utf-8"))
    used = load_grpo_config(config, overrides, world_size=None)
    num_samples = used.training.chunk_size * used.training.num_rollouts * used.algorithm.num_generations
    steps = [record for record in records if "timing/all" in record]
    after = summary["after"]
    return WholeRun(
        sum(step["timing/all"] for step in steps[num_warmup_steps:]),
        sum(step["timing/rollout"] for step in steps[num_warmup_steps:]),
        round(sum(step["response_length/mean"] for step in steps) * num_samples),
        (after["accuracy"], after["low"], after["high"]),
    )


def percent(accuracy: tuple[float, float, float]) -> str:
    """Return an accuracy with its interval."""
    mean, low, high = (100 * part for part in accuracy)
    return f"{mean:5.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    """Take the turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--segment-tokens", type=int, default=64)
    parser.add_argument("--in-flight", type=float, default=3.0)
    parser.add_argument("--max-segments", type=int, default=13)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a pair of runs each (default 0 1 2)")
    parser.add_argument("--warmup", type=int, default=5, help="first steps that are not counted (default 5)")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_intermixed_args()
    names = ("segment_tokens", "in_flight", "max_segments")
    segments = [f"rollout.{name}={getattr(arguments, name)}" for name in names]
    print("  seed      in step  generation  in segments  generation   ratio  held-out accuracy in step, in segments")
    pairs = []
    for turn, seed in enumerate(arguments.seeds):
        sides = {"step": [], "segments": segments}
        # Who goes first alternates as well.
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        found = {
            side: measure(arguments.config, [*arguments.overrides, *sides[side], f"run.seed={seed}"], arguments.warmup)
            for side in order
        }
        plain, partial = found["step"], found["segments"]
        pairs.append((plain, partial))
        print(
            f"  {seed:4d} {plain.steps_s:10.1f} s {plain.generation_s:9.1f} s {partial.steps_s:8.1f} s "
            f"{partial.generation_s:9.1f} s {plain.steps_s / partial.steps_s:7.2f}  "
            f"{percent(plain.accuracy)}, {percent(partial.accuracy)}",
            flush=True,
        )
    ratios = sorted(plain.steps_s / partial.steps_s for plain, partial in pairs)
    tokens = ", ".join(f"{plain.num_tokens:,} and {partial.num_tokens:,}" for plain, partial in pairs)
    print(f"  tokens of responses: {tokens}")
    print(f"  steps are {statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if arguments.out:
        turns = [[asdict(plain), asdict(partial)] for plain, partial in pairs]
        arguments.out.write_text(json.dumps({"segments": segments, "ratios": ratios, "runs": turns}, indent=2))


if __name__ == "__main__":
    main()
