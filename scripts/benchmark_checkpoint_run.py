"""What a checkpoint costs in a whole run: steps of `mindrlhf train` with one being written, and without, in turns.

    .venv/bin/python scripts/benchmark_checkpoint_run.py [--steps 40]

GRPO on one rank, a random Qwen2 of 106M parameters, 4 prompts x 8 samples x 64 tokens a step, all of them of the same
length, so that steps do the same work. Every other step is saved: the step after it waits for the copy, which counts
to that step, and then shares the processor with the writing. The other steps are those of a run without checkpoints.
benchmark_checkpoint.py measures updates alone. Forty steps take about twenty-five minutes on two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmark import ROOT, Case, prepare

from mindrlhf.observe.records import read_jsonl

MODEL = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 6}
MODEL |= {"intermediate_size": 3072}
# The first step compiles; the next two save for the first time, into memory that is new.
NUM_WARMUP_STEPS = 3


def train(directory: Path, num_steps: int) -> list[dict]:
    """Run a training with the threads that it sets itself; return its metrics after the warm-up."""
    output = directory / "run"
    settings = {
        "run.output_dir": output,
        "run.max_steps": num_steps + NUM_WARMUP_STEPS,
        "model.path": directory / "model",
        "data.train_file": directory / "prompts.mindrecord",
        "data.tokenizer_dir": directory / "model",
        "training.micro_batch_size": 8,
        "optimizer.start_lr": 1e-5,
        "checkpoint.every_steps": 2,
        "checkpoint.keep_last": 1,
    }
    command = [sys.executable, "-m", "mindrlhf.cli", "train", "examples/sanity/config.yaml"]
    command += [f"{key}={value}" for key, value in settings.items()]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    result = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"benchmark_checkpoint_run: the run failed\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    steps = list(read_jsonl(output / "metrics.jsonl"))[NUM_WARMUP_STEPS:]
    assert all(step["response_length/min"] == 64 for step in steps), "a response ended early"
    return steps


def compare(steps: list[dict]) -> dict:
    """Compare the steps that a checkpoint falls into with the others."""
    saved = [step for step in steps if "timing/checkpoint" in step]
    others = [step for step in steps if "timing/checkpoint" not in step]
    with_s, without_s = ([step["timing/all"] for step in group] for group in (saved, others))
    delay_s, step_s = statistics.mean(with_s) - statistics.mean(without_s), statistics.mean(without_s)
    error_s = sum(statistics.variance(values) / len(values) for values in (with_s, without_s)) ** 0.5
    return {
        "steps": len(steps),
        "step_without_s": step_s,
        "step_without_std_s": statistics.stdev(without_s),
        "rollout_without_s": statistics.mean(step["timing/rollout"] for step in others),
        "update_without_s": statistics.mean(step["timing/update"] for step in others),
        "delay_s": delay_s,
        "delay_standard_error_s": error_s,
        "blocking_s": statistics.median(step["timing/checkpoint"] for step in saved),
        "overhead_percent_by_every_steps": {
            every_steps: round(100 * delay_s / (every_steps * step_s), 2) for every_steps in (1, 2, 5, 10, 100)
        },
    }


def main() -> None:
    """Run the training and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps after the warm-up (default 40)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(Case(512, 8, arguments.steps, NUM_WARMUP_STEPS), directory)
        config_path = directory / "model" / "config.json"
        config_path.write_text(json.dumps(json.loads(config_path.read_text()) | MODEL))
        print(json.dumps(compare(train(directory, arguments.steps)), indent=1))


if __name__ == "__main__":
    main()
