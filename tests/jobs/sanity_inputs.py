"""Small inputs for whole runs, made as a user makes them: examples/sanity, with an even smaller model."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from page_blocks import undocumented

REPOSITORY = Path(__file__).parents[2]
# Heads of 32 are the smallest that vLLM's attention on a CPU takes.
SMALLER = {
    "hidden_size": 64,
    "num_hidden_layers": 1,  # a second layer more than doubles the time to compile
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    # Far from uniform, so that rewards and log-probs differ from token to token.
    "initializer_range": 0.1,
}


def environment(mark: str = "") -> dict[str, str]:
    """Return the environment of a command; ``mark`` tells its processes from all others."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MINDRLHF_TEST_MARK": mark}


def command(*arguments: object) -> list[str]:
    """Return the argv of a `mindrlhf` command."""
    return [sys.executable, "-m", "mindrlhf.cli", *map(str, arguments)]


def run(*arguments: object, timeout_s: float, code: int = 0) -> subprocess.CompletedProcess:
    """Run a `mindrlhf` command in the repository to its end, with this exit code."""
    finished = subprocess.run(
        command(*arguments), cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished


def made_once(name: str, make_in: Callable[[Path], object]) -> Path:
    """Return the directory that the first of all processes of a test run filled by ``make_in``; others only read it."""
    root = Path(os.environ["MINDRLHF_TEST_INPUTS"])
    made, making = root / name, root / f"{name}.making"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            make_in(making)
            making.rename(made)
    return made


def make(directory: Path) -> None:
    """Write ``model`` (with random weights and tokenizer) and ``prompts.mindrecord`` into ``directory``."""
    shutil.copytree(made_once("sanity", _make), directory, dirs_exist_ok=True)


def _make(directory: Path) -> None:
    prepare = REPOSITORY / "examples" / "sanity" / "prepare.py"
    subprocess.run([sys.executable, prepare, "--out", directory], check=True, env=environment(), timeout=300)
    bare = directory / "model"
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, **SMALLER}))
    bare.rename(directory / "bare")
    weights = ("--config", directory / "bare" / "config.json", "--tokenizer", directory / "bare")
    run("weights", "random", *weights, "--output", directory / "model", timeout_s=300)
    run(
        *("data", "build", "--input", directory / "prompts.jsonl", "--output", directory / "prompts.mindrecord"),
        *("--tokenizer", directory / "model", "--handler", "map_keys", "--map", "question=prompt,answer=answer"),
        *("--template", "plain", "--max-prompt-length", 32, "--processes", 1),
        timeout_s=300,
    )


def make_pairs(directory: Path) -> None:
    """Write ``sft.mindrecord`` and ``preference.mindrecord``, of 40 prompts of :func:`make`, beside them."""
    prompts = [line["prompt"] for line in read_lines(directory / "prompts.jsonl")]
    pairs = [{"prompt": prompt, "good": prompt[::-1], "bad": prompt.upper()} for prompt in prompts[:40]]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for task, fields in (("sft", "response=good"), ("preference", "response=good,rejected=bad")):
        run(
            *("data", "build", "--task", task, "--input", directory / "pairs.jsonl"),
            *("--output", directory / f"{task}.mindrecord", "--tokenizer", directory / "model"),
            *("--handler", "map_keys", "--map", f"question=prompt,{fields}", "--template", "plain"),
            *("--max-prompt-length", 16, "--max-length", 32, "--processes", 1),
            timeout_s=300,
        )


def overrides(directory: Path, output_dir: Path, **more: object) -> list[str]:
    """Return the arguments that make examples/sanity/config.yaml a short run on these inputs."""
    values = {
        "run.output_dir": output_dir,
        "model.path": directory / "model",
        "model.random_init": "false",
        "data.train_file": directory / "prompts.mindrecord",
        "data.tokenizer_dir": directory / "model",
        "algorithm.num_generations": 4,
        "rollout.max_response_length": 16,
        "training.micro_batch_size": 2,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return [f"{name}={value}" for name, value in values.items()]


def train(directory: Path, output_dir: Path, *options: object, timeout_s: float, **more: object):
    """Run `mindrlhf train` on the sanity recipe."""
    arguments = ("train", "examples/sanity/config.yaml", *overrides(directory, output_dir, **more), *options)
    return run(*arguments, timeout_s=timeout_s)


def read_lines(path: Path) -> list[dict]:
    """Return the records of a JSON lines file; every metric of a run must be documented."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.name == "metrics.jsonl":
        names = {name for record in records for name in record}
        assert undocumented(names - {"step"}) == []
    return records
