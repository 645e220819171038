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
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

NUM_PROMPTS = 1319  # of an evaluation: GSM8K's test set
LONG_TEXT = 20_000  # characters of a completion
LONGEST_SAMPLE, LONGEST_PROMPT = 16_384, 1024  # tokens
ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "examples" / "quickstart" / "checkpoint"
RIGHT = {
    "integers": ("accuracy_reward", "so N more are #### N", "N"),
    "expressions": ("qwen_accuracy_reward", r"so it is \boxed{(x+N)(x+1)}", "x^2+(N+1)x+N"),
}
SAMPLES_PER_STEP = 2  # the default of observe.samples_per_step

Measured = Callable[[], int]


def checkpoints(size: int, directory: Path) -> Measured:
    """A run with so many evaluations, and a checkpoint's state after each."""
    from mindrlhf.checkpoint.state import RunState, pack_state, write_state
    from mindrlhf.evaluation.heldout import Evaluation

    scores = np.random.default_rng(0).integers(0, 2, (NUM_PROMPTS, 1)).astype(float)
    evaluations = [
        Evaluation(step, "accuracy_reward", {"accuracy_reward": scores.copy()}, 1.0, []) for step in range(size)
    ]

    def run() -> int:
        num_bytes = 0
        for number in range(1, size + 1):
            checkpoint = directory / f"step_{number:08d}"
            checkpoint.mkdir()
            state = RunState(number, number, 0, {}, {})
            write_state(checkpoint, pack_state(state, {"evaluations": evaluations[:number], "leftover": []}))
            num_bytes += sum(path.stat().st_size for path in checkpoint.iterdir())
        return num_bytes

    return run


def write_run(directory: Path, num_steps: int) -> Path:
    """Write the samples of a run with long ones; return their path."""
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


def data_build(size: int, directory: Path) -> Measured:
    """`mindrlhf data build` of so many prompts with their answers, in one process."""
    from mindrlhf.data.build import build_prompts

    rng = np.random.default_rng(0)
    words = ["a", "box", "of", "apples", "pens", "costs", "holds", "how", "many", "more", "are", "there", "in", "each"]
    with (directory / "raw.jsonl").open("w") as file:
        for number in range(size):
            question = f"{number}: " + " ".join(rng.choice(words, rng.integers(20, 70)))
            file.write(json.dumps({"question": question, "answer": f"It is so. #### {number}"}) + "\n")
    output = directory / "prompts.mindrecord"

    def run() -> int:
        build_prompts(
            [directory / "raw.jsonl"], output, TOKENIZER, template="plain", num_workers=1, show_progress=False
        )
        return sum(path.stat().st_size for path in directory.glob("prompts.mindrecord*"))

    return run


def prompt_stream(size: int, directory: Path) -> Measured:
    """The order of so many prompts, shuffled, taken to the end of an epoch 1,024 at a time."""
    from mindrlhf.data.stream import PromptStream

    def run() -> int:
        stream = PromptStream(size, seed=0, num_epochs=1)
        return 8 * sum(len(stream.next(1024)) for _ in range(-(-size // 1024)))

    return run


def rewards(verifier: str, completion: str, answer: str, size: int, directory: Path) -> Measured:
    """So many samples, each with a number of its own for N, go through the pool with one worker."""
    from mindrlhf.rewards.pool import RewardPool
    from mindrlhf.rewards.selection import Selection
    from mindrlhf.rewards.types import RewardInput

    samples = [
        RewardInput(number, completion.replace("N", str(number)), answer.replace("N", str(number)))
        for number in range(1, size + 1)
    ]

    def run() -> int:
        with RewardPool(Selection((verifier,), (1.0,)), 1) as pool:
            if any(result.total != 1.0 for result in pool.score(samples)):
                raise SystemExit(f"{verifier} takes a right answer for wrong")
        return sum(len(sample.completion) for sample in samples)

    return run


def weight_buffer(size: int, directory: Path) -> Measured:
    """Four versions of so many MiB of weights are published and verified."""
    from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer

    tensor = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    infos = [TensorInfo(f"weight {number}", "float32", tensor.shape) for number in range(size // 4)]

    def run() -> int:
        with WeightBuffer.create(infos) as buffer:
            for version in range(1, 5):
                buffer.begin(version)
                for info in infos:
                    buffer.write(info.name, tensor)
                buffer.commit()
                buffer.verify(version)
        return 4 * len(infos) * tensor.nbytes

    return run


def report(size: int, directory: Path) -> Measured:
    """The report of a run of so many steps with short samples."""
    from mindrlhf.observe.report import write_report

    rng, names = np.random.default_rng(0), ("reward/std", "response_length/mean", "entropy", "loss", "grad_norm", "lr")
    stages = ("rollout", "pack", "old_log_p", "update", "reshard_to_infer")
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, size + 1):
            line = {name: float(value) for name, value in zip(names, rng.random(len(names)))}
            line |= {f"timing/{stage}": float(value) for stage, value in zip(stages, rng.random(len(stages)))}
            line |= {"step": step, "reward/mean": float(rng.random()), "timing/all": 6.0}
            file.write(json.dumps(line) + "\n")
    with (directory / "samples.jsonl").open("w") as file:
        for number in range(size * SAMPLES_PER_STEP):
            sample = {
                "step": number // SAMPLES_PER_STEP + 1,
                "prompt": f"{number}?",
                "completion": "so 4",
                "answer": "4",
            }
            file.write(json.dumps({**sample, "reward": 1.0, "rewards": {"a": 1.0}, "finish_reason": "stop"}) + "\n")
    return lambda: write_report(directory).stat().st_size


def plan(size: int, directory: Path) -> Measured:
    """`mindrlhf plan` of a 32B model on so many devices."""
    from mindrlhf.dryrun.plan.report import PlanOptions, report_plan

    layout = {"rollout.num_replicas": size // 8, "parallel_config.data_parallel": size // 16}
    batch = {"training.chunk_size": size, "training.num_rollouts": 1}
    overrides = [f"{key}={value}" for key, value in {**layout, **batch}.items()]
    return lambda: len(report_plan("examples/grpo/qwen2_5_32b_16npu.yaml", overrides, PlanOptions(world_size=size))[0])


def shards(size: int, directory: Path) -> Measured:
    """A model of 29 million parameters for so many data-parallel copies, without a sharded optimiser."""
    from mindrlhf.shards.shard import shard_directory
    from mindrlhf.weights.convert import export_hf, random_hf_weights

    config = json.loads((Path(TOKENIZER) / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8000}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    export_hf(random_hf_weights(config, 0), config, directory / "model", dtype="float32")

    def run() -> int:
        shard_directory(directory / "model", directory / "shards", parallel=f"dp={size}", num_workers=1)
        held = {path.stat().st_ino: path.stat().st_size for path in (directory / "shards").rglob("*") if path.is_file()}
        return sum(held.values())

    return run


class Held:
    """A rank of ``messages``: keeps what it is given."""

    def receive(self, arrays: list) -> None:
        self.arrays = arrays


def messages(num_replicas: int, num_ranks: int, num_rows: int) -> Measured:
    """Rank 0 gives all ranks their rows, as before an update: six arrays of 4,096 places; bytes that leave it."""
    from mindrlhf.layout.layout import Layout
    from mindrlhf.training import team as teams
    from mindrlhf.training.replica_team import ReplicaTeam

    sent = [0]

    class Counted(socket.socket):
        def sendmsg(self, *arguments):
            number = super().sendmsg(*arguments)
            sent[0] += number
            return number

    def share(ranks, layout, arrays):  # in place of the collective
        sent[0] += sum(array.nbytes for array in arrays.values()) * (ranks[0] == 0 and bool(arrays))
        return {name: np.zeros(shape, dtype) for name, dtype, shape in layout}

    teams._share = share
    pairs = [socket.socketpair() for _ in range(num_replicas * num_ranks - 1)]
    threads = [threading.Thread(target=teams.serve, args=(Held(), theirs), daemon=True) for _, theirs in pairs]
    for thread in threads:
        thread.start()
    team = teams.Team(Held(), [Counted(fileno=ours.detach()) for ours, _ in pairs])
    replicas = ReplicaTeam(team, Layout(data_parallel=num_replicas, model_parallel=num_ranks))
    rows = [np.zeros((num_rows // num_replicas, 4096), np.int32) for _ in range(6)]

    def run() -> int:
        replicas.call("receive", per_rank=[{"arrays": list(rows)} for _ in range(num_replicas)])
        team.close()
        for thread in threads:
            thread.join()
        return sent[0]

    return run


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured; ``limit`` says what its cost is made of."""

    unit: str
    size: int
    make: Callable[[int, Path], Measured]
    limit: str


CASES = {
    "data build": Case("prompts", 2000, data_build, "tokenizing, one process"),
    "prompt stream": Case("prompts", 65_536, prompt_stream, "a sort of the epoch"),
    "plan": Case("devices", 64, plan, "memory of each rank"),
    **{
        f"rewards, {kind}": Case("samples", number, functools.partial(rewards, *RIGHT[kind]), limit)
        for kind, number, limit in (
            ("integers", 4096, "messages to the worker"),
            ("expressions", 128, "SymPy; divided by reward.num_workers"),
        )
    },
    "weight buffer": Case("MiB", 64, weight_buffer, "copies and sums"),
    "report": Case("steps of short samples", 400, report, "JSON of each line"),
    "messages, ranks": Case(
        "ranks of a replica", 4, lambda size, _: messages(1, size, 1024), "one copy, which the ranks of a machine map"
    ),
    "messages, rows": Case("packed sequences of 4,096", 256, lambda size, _: messages(4, 4, size), "copies"),
    "shards": Case("copies of a model", 4, shards, "one copy; a link for each rank"),
    "checkpoints": Case("evaluations, a checkpoint each", 16, checkpoints, "JSON of each new evaluation; fsync"),
    "resume": Case("steps of long samples", 400, resume, "the steps that are removed"),
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
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(Path(__file__).resolve()), "--one", name, str(size)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
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
