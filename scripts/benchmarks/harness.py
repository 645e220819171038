"""Parts of the benchmarks: start commands, read the figures of a run, make its inputs."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindrlhf.observe.records import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
BENCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
SANITY = "examples/sanity/config.yaml"
RESPONSE_LENGTH = 64  # of the sanity example
MEDIUM = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048}


def environment() -> dict[str, str]:
    """Return an environment with one thread for each process; kernels are those that a library chooses by itself."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**inherited, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}


def run(command: Sequence[str]) -> str:
    """Run a command in the repository and return its output; end with its errors when it fails."""
    ended = subprocess.run([*map(str, command)], cwd=ROOT, env=environment(), capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"benchmark: {' '.join(map(str, command))} failed\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    return ended.stdout


def mindrlhf(*words: object) -> list[str]:
    """Return the words of a `mindrlhf` command."""
    return [sys.executable, "-m", "mindrlhf.cli", *map(str, words)]


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Run a command; return its wall seconds, and the processor seconds of it and its children."""

    def processor_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    start, before = time.perf_counter(), processor_s()
    run(command)
    return time.perf_counter() - start, processor_s() - before


def make_sanity(directory: Path, vocab_size: int = 512, model: Mapping[str, object] | None = None) -> None:
    """Make a random model and prompts whose responses all have ``RESPONSE_LENGTH`` tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model_config.json").write_text(json.dumps(model or {}), encoding="utf-8")
    words = ["--out", directory, "--endless", "--vocab-size", vocab_size]
    run([sys.executable, "examples/sanity/prepare.py", *words, "--model-config", directory / "model_config.json"])
    words = ["--input", directory / "prompts.jsonl", "--output", directory / "prompts.mindrecord"]
    words += ["--tokenizer", directory / "model", "--handler", "map_keys", "--map", "question=prompt,answer=answer"]
    run(mindrlhf("data", "build", *words, "--template", "plain", "--max-prompt-length", 16))


def train(
    inputs: Path, output: Path, num_steps: int, *, warm_up: int, ranks: int = 1, **settings: object
) -> list[dict]:
    """Train on what ``make_sanity`` has made; return the metrics of the steps after the warm-up.

    Args:
        settings: keys of the config, with __ for the dot.
    """
    keys = {"run.output_dir": output, "run.max_steps": num_steps + warm_up, "model.path": inputs / "model"}
    keys |= {"data.train_file": inputs / "prompts.mindrecord", "data.tokenizer_dir": inputs / "model"}
    keys |= {"rollout.num_threads": 1, "observe.sinks": "[]"}
    keys |= {name.replace("__", "."): value for name, value in settings.items()}
    run(mindrlhf("train", SANITY, "--workers", ranks, *(f"{key}={value}" for key, value in keys.items())))
    steps = [record for record in read_jsonl(output / "metrics.jsonl") if "timing/all" in record][warm_up:]
    assert all(step["response_length/min"] == RESPONSE_LENGTH for step in steps), "a response ended early"
    return steps
