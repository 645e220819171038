"""Processor seconds of commands at x1, x4 and x16 of their work, with the exponent of the growth.

The exponent is the slope of the logarithm of seconds, less those of a start, over that of sizes, by least squares; 1 is
linear.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from harness import mindrlhf, timed

TOKENIZER = Path("examples/quickstart/checkpoint")


def data_build(size: int, directory: Path) -> list[str]:
    """So many questions of 20 to 70 words, tokenized in one process."""
    rng, words = np.random.default_rng(0), ["a", "box", "of", "apples", "costs", "how", "many", "are", "there"]
    with (directory / "raw.jsonl").open("w", encoding="utf-8") as file:
        for number in range(size):
            question = f"{number}: " + " ".join(rng.choice(words, rng.integers(20, 70)))
            file.write(json.dumps({"question": question, "answer": f"It is so. #### {number}"}) + "\n")
    words = ["--input", directory / "raw.jsonl", "--output", directory / "prompts.mindrecord", "--tokenizer", TOKENIZER]
    return mindrlhf("data", "build", *words, "--template", "plain", "--max-prompt-length", 256, "--processes", 1)


def rewards(size: int, directory: Path) -> list[str]:
    """So many right answers, scored by one process."""
    with (directory / "samples.jsonl").open("w", encoding="utf-8") as file:
        for number in range(size):
            file.write(json.dumps({"completion": f"so it is #### {number}", "answer": str(number)}) + "\n")
    words = ["--verifier", "accuracy_reward", "--input", directory / "samples.jsonl"]
    return mindrlhf("rewards", "score", *words, "--output", directory / "scored.jsonl")


def report(size: int, directory: Path) -> list[str]:
    """A run of so many steps with two short samples each."""
    _write_run(directory, size)
    return mindrlhf("report", directory)


def view(size: int, directory: Path) -> list[str]:
    """The page of samples of the same."""
    _write_run(directory, size)
    return mindrlhf("view", directory)


def shards(size: int, directory: Path) -> list[str]:
    """The quickstart's model for so many data-parallel ranks."""
    words = [TOKENIZER, "--parallel", f"dp={size}", "--output", directory / "shards", "--processes", 1]
    return mindrlhf("weights", "shard", *words)


def plan(size: int, directory: Path) -> list[str]:
    """The plan of a 32B model on so many NPUs."""
    keys = {"rollout.num_replicas": size // 8, "parallel_config.data_parallel": size // 16}
    keys |= {"training.chunk_size": size, "training.num_rollouts": 1}
    words = [f"{key}={value}" for key, value in keys.items()]
    return mindrlhf("plan", "examples/grpo/qwen2_5_32b_16npu.yaml", "--workers", size, *words)


def _write_run(directory: Path, num_steps: int) -> None:
    rng = np.random.default_rng(0)
    names = ("reward/mean", "entropy", "loss", "grad_norm", "timing/rollout", "timing/update")
    with (
        (directory / "metrics.jsonl").open("w", encoding="utf-8") as metrics,
        (directory / "samples.jsonl").open("w", encoding="utf-8") as samples,
    ):
        for step in range(1, num_steps + 1):
            line = dict(zip(names, rng.random(len(names)).tolist())) | {"step": step, "timing/all": 3.0}
            metrics.write(json.dumps(line) + "\n")
            for number in range(2):
                sample = {"step": step, "prompt": f"{number}?", "completion": "so 4", "answer": "4", "reward": 1.0}
                samples.write(json.dumps({**sample, "rewards": {"a": 1.0}, "finish_reason": "stop"}) + "\n")


CASES: dict[str, tuple[int, Callable[[int, Path], list[str]]]] = {
    "data build": (2000, data_build),
    "rewards": (4096, rewards),
    "report": (1000, report),
    "view": (1000, view),
    "shards": (4, shards),
    "plan": (64, plan),
}


def measure(directory: Path, smallest: bool, repeats: int) -> Iterator[dict]:
    start_s = timed(mindrlhf("--version"))[1]
    for name, (size, make) in CASES.items():
        sizes = [size] if smallest else [size, 4 * size, 16 * size]
        seconds = []
        for count in sizes:
            work = directory / f"{name.replace(' ', '_')}_{count}"
            work.mkdir()
            command = make(count, work)
            seconds.append(timed(command)[1])
        grown = np.maximum(np.array(seconds) - start_s, 0.01)
        slope = float(np.polyfit(np.log(sizes), np.log(grown), 1)[0]) if len(sizes) > 1 else float("nan")
        figures = {f"x{4**index} s": value for index, value in enumerate(seconds)}
        yield {"case": name, "size": size, **figures, "exponent": slope}
