"""One step of GRPO side by side: MindRLHF against Hugging Face TRL, same sizes, one core each, in one run.

    bash scripts/setup.sh && bash scripts/setup_benchmark.sh
    .venv/bin/python scripts/benchmark.py [--case NAME] [--case NAME] [--repeats 3] [--out benchmark.json]

Both train a random Qwen2 on 4 prompts x 8 samples x 64 tokens, no KL, one update a step. "small" has 4 layers, hidden
128, 512 vocabulary entries and one micro-batch of 32; "large" has 151,936 entries and micro-batches of 8; "medium" has
12 layers, hidden 512, 32,000 entries (62M parameters) and micro-batches of 8. In these two many samples earn what all
of their group earn, and have no gradient: ours leaves them out, TRL does not; in "medium_all" and "large_all" ours
computes them too. "smollm2" is a published model, SmolLM2-135M-Instruct, all weights, on the sums of
examples/real_model (8 x 8 x up to 24 tokens), "smollm2_bfloat16" the same with our rollout in bfloat16: there the
seconds are those of the processor, of all processes of a side, since a step takes a minute.

The two sides take turns, and each turn gives the median step after warm-up; the ratio of each pair of turns is one
measurement, so what else the machine is doing falls on both sides. How the update grows with ranks, samples and lengths
is measured by benchmark_update.py.

Neither side writes TensorBoard files; ours writes its metrics and samples all the same, where TRL logs nothing.

All processes of a side share one core: limits on threads would not be enough, since MindSpore computes elementwise work
on a second thread however few it is allowed. ``--any-core`` leaves them free.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mindrlhf.observe.records import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
BENCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"


@dataclass(frozen=True)
class Case:
    """One pair of sizes."""

    vocab_size: int
    micro_batch: int
    num_steps: int
    num_warmup_steps: int
    model: dict = field(default_factory=dict)  # keys of config.json that are not as in examples/sanity
    skips: bool = True  # samples without a gradient, which TRL computes


MEDIUM = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048}
CASES = {
    "small": Case(512, 32, 20, 5),
    "medium": Case(32_000, 8, 3, 2, MEDIUM),
    "medium_all": Case(32_000, 8, 3, 2, MEDIUM, skips=False),
    "large": Case(151_936, 8, 3, 2),
    "large_all": Case(151_936, 8, 3, 2, skips=False),
}


# Our settings of cases with a published model, beside those of examples/real_model.
REAL = {"smollm2": {}, "smollm2_bfloat16": {"rollout.dtype": "bfloat16"}}
REAL_STEPS, REAL_WARMUP_STEPS = 2, 1


@dataclass(frozen=True)
class Turn:
    """One side's measurement: median seconds of a step and of its generation, and peak memory in GB."""

    step_s: float
    generation_s: float
    peak_gb: float


def environment() -> dict[str, str]:
    """Return the environment that holds both sides to one thread; kernels are those that each chooses by itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MKL_NUM_THREADS": "1"}


def run(command: list[str]) -> str:
    """Run a command in the repository and return its output; its errors are shown when it fails."""
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"benchmark: {' '.join(command[:4])} ... failed\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    return result.stdout


def prepare(case: Case, directory: Path) -> None:
    """Make model, tokenizer and prompts of a case."""
    (directory / "model_config.json").write_text(json.dumps(case.model))
    run([sys.executable, "examples/sanity/prepare.py", "--out", str(directory), "--endless"]
        + ["--vocab-size", str(case.vocab_size), "--model-config", f"{directory}/model_config.json"])  # fmt: skip
    run([sys.executable, "-m", "mindrlhf.cli", "data", "build", "--input", f"{directory}/prompts.jsonl"]
        + ["--output", f"{directory}/prompts.mindrecord", "--tokenizer", f"{directory}/model"]
        + ["--handler", "map_keys", "--map", "question=prompt,answer=answer", "--template", "plain"]
        + ["--max-prompt-length", "16"])  # fmt: skip


def train(settings: Mapping[str, object], num_warmup_steps: int, response_length: int) -> Turn:
    """Run `mindrlhf train` on the sanity example with other settings and read its own timings."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    run([sys.executable, "-m", "mindrlhf.cli", "train", "examples/sanity/config.yaml", *overrides])
    steps = list(read_jsonl(Path(settings["run.output_dir"], "metrics.jsonl")))[num_warmup_steps:]
    assert all(step["response_length/min"] == response_length for step in steps), "a response ended early"
    return Turn(
        statistics.median(step["timing/all"] for step in steps),
        statistics.median(step["timing/rollout"] for step in steps),
        steps[-1]["memory/peak_rss_gb"],
    )


def read_trl(command: list[str]) -> Turn:
    """Run a script of TRL's side and read its last line."""
    result = json.loads(run(command).splitlines()[-1])
    return Turn(result["median_step_wall_s"], result["median_generation_wall_s"], result["peak_rss_bytes"] / 1e9)


def measure_mindrlhf(case: Case, directory: Path, turn: int) -> Turn:
    """Run `mindrlhf train` and read its own timings."""
    output = directory / f"run_{turn}"
    settings = {
        "run.output_dir": output,
        "run.max_steps": case.num_steps + case.num_warmup_steps,
        "model.path": directory / "model",
        "data.train_file": directory / "prompts.mindrecord",
        "data.tokenizer_dir": directory / "model",
        "training.micro_batch_size": case.micro_batch,
        "training.skip_zero_advantages": str(case.skips).lower(),
        "rollout.num_threads": 1,
        "observe.tensorboard": "false",
    }
    return train(settings, case.num_warmup_steps, 64)


def measure_trl(case: Case, directory: Path) -> Turn:
    """Run scripts/benchmark_trl.py in its own environment."""
    command = [str(BENCH_PYTHON), "scripts/benchmark_trl.py", "--vocab-size", str(case.vocab_size)]
    command += ["--model-config", f"{directory}/model_config.json", "--micro-batch", str(case.micro_batch)]
    command += ["--steps", str(case.num_steps), "--warmup-steps", str(case.num_warmup_steps)]
    return read_trl(command)


def prepare_real(directory: Path) -> None:
    """Get the model, make the sums."""
    run(["bash", "examples/real_model/get_model.sh", "runs/real_model/model"])
    run([sys.executable, "examples/real_model/sums.py", "--out", str(directory)])
    run([sys.executable, "-m", "mindrlhf.cli", "data", "build", "--input", f"{directory}/train.jsonl"]
        + ["--output", f"{directory}/train.mindrecord", "--tokenizer", "runs/real_model/model", "--handler", "gsm8k"]
        + ["--template", "chat", "--max-prompt-length", "48"])  # fmt: skip
    config = yaml.safe_load((ROOT / "examples/real_model/config.yaml").read_text(encoding="utf-8"))
    for section in ("evaluation", "lora", "checkpoint"):
        del config[section]
    config["data"] = {"train_file": f"{directory}/train.mindrecord", "tokenizer_dir": "runs/real_model/model"}
    (directory / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def measure_real(directory: Path, turn: int, changes: Mapping[str, str]) -> tuple[Turn, Turn]:
    """Processor seconds of a step of both sides, and of its generation; ours is that of the rollout server."""
    settings = {
        "run.output_dir": directory / f"run_{turn}", "run.max_steps": REAL_STEPS + REAL_WARMUP_STEPS,
        "optimizer.start_lr": 2e-5, "rollout.max_response_length": 24, "training.sequence_lengths": "[400]",
        "rollout.num_threads": 1, "observe.tensorboard": "false", **changes,
    }  # fmt: skip
    command = [sys.executable, "-m", "mindrlhf.cli", "train", f"{directory}/config.yaml"]
    command += [f"{key}={value}" for key, value in settings.items()]
    metrics, spent = Path(settings["run.output_dir"], "metrics.jsonl"), {}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            num_steps = metrics.read_text().count("\n") if metrics.exists() else 0
            if num_steps not in spent:
                spent[num_steps] = processor_seconds(process.pid)
            time.sleep(0.05)
    if process.returncode:
        sys.exit(f"benchmark: {' '.join(command[:4])} ... failed")
    first, last = spent[REAL_WARMUP_STEPS], spent[REAL_WARMUP_STEPS + REAL_STEPS]
    of_all, of_server = ((last[place] - first[place]) / REAL_STEPS for place in (0, 1))
    ours = Turn(of_all, of_server, list(read_jsonl(metrics))[-1]["memory/peak_rss_gb"])
    command = [str(BENCH_PYTHON), "scripts/benchmark_trl_real.py", "--model", "runs/real_model/model"]
    command += ["--problems", f"{directory}/train.jsonl", "--steps", str(REAL_STEPS)]
    theirs = json.loads(run([*command, "--warmup-steps", str(REAL_WARMUP_STEPS)]).splitlines()[-1])
    figures = (theirs["median_step_cpu_s"], theirs["median_generation_cpu_s"], theirs["peak_rss_bytes"] / 1e9)
    return ours, Turn(*figures)


def processor_seconds(root: int) -> tuple[float, float]:
    """What a process and those below it have used so far, and of that the rollout server."""
    parents, used, servers = {}, {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(") ")[2].split()
            command = (path / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        number = int(path.name)
        parents[number], used[number] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        if "mindrlhf.rollout.server" in command:
            servers.add(number)
    total = of_server = 0.0
    for number, seconds in used.items():
        chain = [number]
        while chain[-1] in parents and chain[-1] != root:
            chain.append(parents[chain[-1]])
        if chain[-1] == root:
            total += seconds
            of_server += seconds if servers & set(chain) else 0
    return total, of_server


def compare(name: str, repeats: int) -> dict:
    """Measure a case and print its table."""
    if name in REAL:
        sizes = f"all weights, processor seconds, means of {REAL_STEPS} steps"
        return take_turns(
            name, sizes, repeats, prepare_real, lambda directory, turn: measure_real(directory, turn, REAL[name])
        )
    case = CASES[name]
    sizes = f"vocabulary {case.vocab_size:,}, micro-batch {case.micro_batch}, medians of {case.num_steps} steps"

    def measure(directory: Path, turn: int) -> tuple[Turn, Turn]:
        return measure_mindrlhf(case, directory, turn), measure_trl(case, directory)

    return take_turns(name, sizes, repeats, lambda directory: prepare(case, directory), measure)


def take_turns(
    name: str,
    sizes: str,
    repeats: int,
    prepare_in: Callable[[Path], None],
    measure_in: Callable[[Path, int], tuple[Turn, Turn]],
) -> dict:
    """Measure both sides in turn, print a table, and return its figures."""
    print(f"\n{name}: {sizes}")
    print("  turn     MindRLHF  (rollout)  memory        TRL  (rollout)  memory   ratio")
    pairs = []
    with tempfile.TemporaryDirectory() as directory:
        prepare_in(Path(directory))
        for turn in range(repeats):
            ours, theirs = measure_in(Path(directory), turn)
            pairs.append((ours, theirs))
            cells = [
                f"{side.step_s:8.3f} s {side.generation_s:8.3f} s {side.peak_gb:5.2f} GB" for side in (ours, theirs)
            ]
            print(f"  {turn + 1:4d} {cells[0]} {cells[1]} {ours.step_s / theirs.step_s:7.2f}", flush=True)
    ratios = sorted(ours.step_s / theirs.step_s for ours, theirs in pairs)
    print(f"  step time, MindRLHF / TRL: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return {"case": name, "ratios": ratios, "turns": [[vars(ours), vars(theirs)] for ours, theirs in pairs]}


def run_cases(description: str, names: Sequence[str], compare_case: Callable[[str, int], dict]) -> None:
    """Run the cases that the command line chooses."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--case", choices=sorted(names), action="append", help="default: all")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of turns (default 3)")
    parser.add_argument("--any-core", action="store_true", help="do not hold the processes of a side to one core")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    if not BENCH_PYTHON.exists():
        sys.exit("benchmark: there is no .venv-bench; make it with: bash scripts/setup_benchmark.sh")
    if not arguments.any_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the first has more of the system's own work
    results = [compare_case(name, arguments.repeats) for name in arguments.case or names]
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    run_cases(__doc__.splitlines()[0], [*CASES, *REAL], compare)
