#!/usr/bin/env python3
"""How processor seconds and bytes grow with the work: each case at x1, x4 and x16, with the exponent of its growth.

    .venv/bin/python scripts/benchmark_growth.py [CASE ...] [--rounds 3] [--scales 1 4 16] [--out figures.json]

A case is an entry of ``CASES``: the size at x1, and a function that makes its input of a size in an empty directory and
returns what is measured. That is called in a process of its own, and returns how many bytes it wrote, sent or made.
Seconds are those of the processor, of the process and its children. The exponent of a round is the slope of the
logarithm of seconds over that of sizes, by least squares; given are the median of the rounds, the least and the
greatest. Where the fixed part is large it is below that of what grows. 1 is linear.
"""

import argparse
import dataclasses
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

NUM_PROMPTS = 1319  # of an evaluation: GSM8K's test set
LONG_TEXT = 20_000  # characters of a completion
LONGEST_SAMPLE, LONGEST_PROMPT = 16_384, 1024  # tokens
SAMPLES_PER_STEP = 2  # the default of observe.samples_per_step

Measured = Callable[[], int]


def checkpoints(size: int, directory: Path) -> Measured:
    """A run with so many evaluations, and a checkpoint's state after each."""
    from mindrlhf.checkpoint.state import EvaluationFile, RunState, write_state

    scores = np.random.default_rng(0).integers(0, 2, (NUM_PROMPTS, 1)).astype(float).tolist()
    evaluations = [{"step": step, "rewards": {"accuracy_reward": scores}} for step in range(size)]

    def run() -> int:
        file, num_bytes = EvaluationFile(), 0
        for number in range(1, size + 1):
            checkpoint = directory / f"step_{number:08d}"
            checkpoint.mkdir()
            write_state(checkpoint, RunState(number, number, 0, {}, {}, evaluations[:number]), file)
            num_bytes += (checkpoint / "state.json").stat().st_size
        return num_bytes + (checkpoint / "evaluations.jsonl").stat().st_size

    return run


def write_run(directory: Path, num_steps: int) -> Path:
    """Write what ``rewards audit`` and ``view`` read of a run with long samples; return the path of these."""
    words = np.random.default_rng(0).choice(["so", "we", "add", "3", "and", "4", "which", "gives", "7"], LONG_TEXT // 4)
    text = " ".join(words)[:LONG_TEXT]
    path = directory / "samples.jsonl"
    (directory / "config.yaml").write_text("reward: {verifier_function: [accuracy_reward]}\n")
    with path.open("w") as file:
        for number in range(num_steps * SAMPLES_PER_STEP):
            is_right = number * 7919 % 3 == 0
            sample = {
                "step": number // SAMPLES_PER_STEP + 1,
                "prompt": f"question {number % 997}",
                "completion": text[number % 5000 :],
                "answer": str(number % 10),
                "reward": float(is_right),
                "rewards": {"accuracy_reward": float(is_right)},
                "finish_reason": "stop",
            }
            file.write(json.dumps(sample) + "\n")
    return path


def resume(size: int, directory: Path) -> Measured:
    """A run of so many steps resumes ten steps before its end: its samples are cut there."""
    from mindrlhf.observe.records import JsonlWriter

    path = write_run(directory, size)

    def run() -> int:
        before = written_bytes()
        JsonlWriter(path, first_step=size - 9).close()
        return written_bytes() - before

    return run


def audit(size: int, directory: Path) -> Measured:
    """`mindrlhf rewards audit` of a run of so many steps, without scoring anything again but one sample."""
    from mindrlhf.evaluation.reward_audit import audit_run

    write_run(directory, size)
    return lambda: audit_run(directory, max_rescored=1).num_samples


def view(size: int, directory: Path) -> Measured:
    """What serves the page of `mindrlhf view` reads a run of so many steps, and finds samples by a text."""
    from mindrlhf.observe.viewer.server import SampleIndex

    num_bytes = write_run(directory, size).stat().st_size

    def run() -> int:
        index = SampleIndex(directory)
        index.read()
        index.find({"text": "question 996", "order": "-change"})
        return num_bytes

    return run


def packing(way: str, distribution: str, size: int, directory: Path) -> Measured:
    """Sequences of so many samples of a step, of up to 16,384 tokens: groups of 8 with a prompt of 60 to 1,024.

    Responses are log-normal (median an eighth of the longest, sigma 0.8), uniform, or truncated: three of ten at the
    limit, the others uniform up to a quarter.
    """
    from mindrlhf.data.packing import choose_row_length, plan_rows
    from mindrlhf.layout.packing import Piece, RowCost, plan_best_fit

    rng, longest, group = np.random.default_rng(0), LONGEST_SAMPLE - LONGEST_PROMPT, 8
    prompts = rng.integers(60, LONGEST_PROMPT, -(-size // group))
    drawn = {
        "log-normal": lambda: np.exp(rng.normal(np.log(longest / 8), 0.8, size)),
        "uniform": lambda: rng.uniform(1, longest, size),
        "truncated": lambda: np.where(rng.random(size) < 0.3, longest, rng.uniform(16, longest / 4, size)),
    }[distribution]()
    responses = np.clip(drawn, 1, longest).astype(int)
    own = [int(prompts[number // group]) for number in range(size)]
    lengths = [prompt + int(response) for prompt, response in zip(own, responses)]
    rows = choose_row_length((), max(lengths), "the longest sample", "ascend", is_fitted=True)
    cost = RowCost(per_position=1.0, per_pair=2e-5)
    pieces = [Piece(length, group=number) for number, length in enumerate(lengths)]
    if way == "shared_prompts":
        pieces = [Piece(int(responses[number]), own[number] - 1, number // group) for number in range(size)]

    def run() -> int:
        made = plan_rows(lengths, rows) if way == "first_fit" else plan_best_fit(pieces, rows, cost)
        return 4 * sum(row.length for row in made)  # of token ids

    return run


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured; ``limit`` says what its cost is made of."""

    unit: str
    size: int
    make: Callable[[int, Path], Measured]
    limit: str


CASES = {
    "checkpoints": Case("evaluations, a checkpoint each", 16, checkpoints, "JSON of each new evaluation; fsync"),
    "resume": Case("steps of long samples", 400, resume, "the steps that are cut"),
    "view": Case("steps of long samples", 400, view, "JSON of each sample, read twice"),
    "audit": Case("steps of long samples", 400, audit, "JSON and features of each completion, 2,000 permutations"),
    **{
        f"{way}, {distribution}": Case(
            "samples of a step", 4096, functools.partial(packing, way, distribution), "a search for each sample"
        )
        for way in ("first_fit", "best_fit", "shared_prompts")
        for distribution in ("log-normal", "uniform", "truncated")
    },
}


def written_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def processor_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_here(case: Case, size: int) -> dict[str, float]:
    """Measure once, in this process."""
    with tempfile.TemporaryDirectory(prefix="growth-") as directory:
        measured = case.make(size, Path(directory))
        before = processor_s()
        num_bytes = measured()
        seconds = processor_s() - before
    return {"seconds": seconds, "bytes": num_bytes, "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measure(name: str, size: int) -> dict[str, float]:
    """Measure once, in a process of its own."""
    root = Path(__file__).resolve().parents[1]
    paths = [str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, "--one", name, str(size)]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def exponent(sizes: list[int], values: list[float]) -> float:
    """Return the slope of log value over log size by least squares; values below 0.01 count as that."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 0.01)), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure_here(CASES[arguments.one[0]], int(arguments.one[1]))))
        return
    if unknown := sorted(set(arguments.cases) - CASES.keys()):
        parser.error(f"no case {unknown[0]}: there are {', '.join(CASES)}")
    figures = {}
    print("| case | " + " | ".join(f"x{scale}" for scale in arguments.scales) + " | exponent | limited by |")
    print("|---" * (len(arguments.scales) + 3) + "|")
    for name in arguments.cases or CASES:
        case = CASES[name]
        sizes = [case.size * scale for scale in arguments.scales]
        rounds = [[measure(name, size) for size in sizes] for _ in range(arguments.rounds)]
        slopes = [exponent(sizes, [one["seconds"] for one in round_]) for round_ in rounds]
        cells = []
        for index in range(len(sizes)):
            columns = {key: statistics.median(round_[index][key] for round_ in rounds) for key in rounds[0][0]}
            cells.append(f"{columns['seconds']:.2f} s, {columns['bytes'] / 1e6:.3g} MB, RSS {columns['rss_mb']:.0f} MB")
        spread = f"{statistics.median(slopes):.2f} ({min(slopes):.2f} to {max(slopes):.2f})"
        print(f"| {name}: {case.size} {case.unit} | {' | '.join(cells)} | {spread} | {case.limit} |", flush=True)
        figures[name] = {"sizes": sizes, "rounds": rounds, "exponents": slopes}
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
