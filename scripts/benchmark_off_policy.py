"""Seconds of a step with off-policy samples, against the same config within the step, in turns.

    .venv/bin/python scripts/benchmark_off_policy.py CONFIG [section.key=value ...] [--off-policy-steps 1] [--steps 20]
        [--warmup 5] [--repeats 3] [--asynchronous TOKENS] [--any-core] [--out figures.json]

Both sides run `mindrlhf train` on the config without checkpoints, and evaluations but a short last one. They take
turns, and each turn gives the median step after warm-up; the ratio of each pair of turns is one measurement, so what
else the machine is doing falls on both sides. Where generation takes a share g of a synchronous step, the ratio is at
best 1 / max(g, 1 - g). With ``--asynchronous`` the other side is the fully asynchronous loop, in rounds of so many
tokens.

The ranks share one core and the servers another, on both sides: MindSpore computes elementwise work on a second thread
however few it is allowed, so that within a step an update would take both cores, and off-policy it could not.
``--any-core`` leaves them free.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from benchmark import ROOT, environment

from mindrlhf.config.load import load_grpo_config
from mindrlhf.observe.records import read_jsonl


@dataclass(frozen=True)
class Turn:
    """Medians of one run's steps: seconds, of the step and of its generation, and shares of time without work."""

    step_s: float
    generation_s: float
    idle_ranks: float
    idle_servers: float


_MODULES = ("mindrlhf.training.main", "mindrlhf.rollout.server")  # of ranks and servers


def hold_to_cores(process: subprocess.Popen, is_over: threading.Event) -> None:
    """Keep the ranks that ``process`` starts on the first core and its servers on the last, until ``is_over``."""
    cores = sorted(os.sched_getaffinity(0))
    while not is_over.wait(0.5):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for child in psutil.Process(process.pid).children(recursive=True):
                for module, core in zip(_MODULES, (cores[0], cores[-1])):
                    if module in child.cmdline():
                        for thread in child.threads():
                            os.sched_setaffinity(thread.id, {core})


def train(arguments: list[str], any_core: bool) -> None:
    """Run `mindrlhf train`; its errors are shown when it fails."""
    command = [sys.executable, "-m", "mindrlhf.cli", "train", *arguments]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    is_over = threading.Event()
    with subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **streams) as process:
        keeper = threading.Thread(target=hold_to_cores, args=(process, is_over), daemon=True)
        if not any_core:
            keeper.start()
        errors = process.communicate()[1]
        is_over.set()
    if process.returncode:
        sys.exit(f"benchmark_off_policy: mindrlhf train failed\n{errors[-2000:]}")


def measure(arguments: argparse.Namespace, ahead: int) -> Turn:
    """Run `mindrlhf train` and read its own timings."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "run.output_dir": directory,
            "run.max_steps": arguments.warmup + arguments.steps,
            "rollout.off_policy_steps": ahead,
            "checkpoint.every_steps": 0,
            "observe.tensorboard": "false",
        }
        if ahead and arguments.asynchronous:
            settings |= {"rollout.asynchronous": "true", "rollout.segment_tokens": arguments.asynchronous}
        if load_grpo_config(arguments.config, arguments.overrides, world_size=None).data.eval_file:
            settings |= {"evaluation.every_steps": 0, "evaluation.before_training": "false"}
            settings["evaluation.max_prompts"] = 1
        own = [f"{key}={value}" for key, value in settings.items()]
        train([arguments.config, *arguments.overrides, *own], arguments.any_core)
        steps = list(read_jsonl(Path(directory) / "metrics.jsonl"))[arguments.warmup :]

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps)

    step_s = median("timing/all")
    if not ahead:
        generation_s = median("timing/rollout")
        return Turn(step_s, generation_s, generation_s / step_s, 1 - generation_s / step_s)
    busy = 1 - median("async/idle_servers")
    return Turn(step_s, busy * step_s, median("async/idle_ranks"), 1 - busy)


def main() -> None:
    """Take the turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--off-policy-steps", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of turns (default 3)")
    parser.add_argument("--asynchronous", type=int, metavar="TOKENS", help="of a round; default: not asynchronous")
    parser.add_argument("--any-core", action="store_true", help="do not hold ranks and servers to a core each")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_intermixed_args()
    lag = arguments.off_policy_steps
    print(f"  turn   within the step  generation  idle ranks   {lag} off-policy  idle ranks  servers   ratio")
    pairs = []
    for turn in range(arguments.repeats):
        # Who goes first alternates as well.
        order = (0, arguments.off_policy_steps) if turn % 2 == 0 else (arguments.off_policy_steps, 0)
        found = {ahead: measure(arguments, ahead) for ahead in order}
        plain, ahead = found[0], found[arguments.off_policy_steps]
        pairs.append((plain, ahead))
        print(
            f"  {turn + 1:4d} {plain.step_s:15.3f} s {plain.generation_s:9.3f} s {plain.idle_ranks:11.0%} "
            f"{ahead.step_s:10.3f} s {ahead.idle_ranks:10.0%} {ahead.idle_servers:8.0%} "
            f"{plain.step_s / ahead.step_s:7.2f}",
            flush=True,
        )
    ratios = sorted(plain.step_s / ahead.step_s for plain, ahead in pairs)
    print(f"  steps are {statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if arguments.out:
        turns = [[asdict(plain), asdict(ahead)] for plain, ahead in pairs]
        given = {"off_policy_steps": arguments.off_policy_steps, "asynchronous": arguments.asynchronous}
        arguments.out.write_text(json.dumps({**given, "ratios": ratios, "turns": turns}, indent=2))


if __name__ == "__main__":
    main()
