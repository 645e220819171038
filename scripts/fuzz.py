"""Damage the input of every parser at random and report what happened.

    python scripts/fuzz.py                               10,000 cases of each parser
    python scripts/fuzz.py --cases 500 --seed 7 --targets 'JSONL records' 'rollout message'
    python scripts/fuzz.py --targets 'JSONL records' --only 4711     one case again, with its traceback

Each parser runs in a process of its own, because some are libraries in C++ or Rust: a crash or a case that does not end
is counted, and the rest goes on after it. Exit code 1 when anything unexpected came up.
"""

import argparse
import contextlib
import json
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fuzz"))

CASE_TIMEOUT_S = 120.0
MEMORY_LIMIT_BYTES = 12 << 30  # of addresses; MindSpore alone takes some GiB of them


def main() -> int:
    arguments = _parse_arguments()
    if arguments.worker is not None:
        return _work(arguments)
    from fuzz_targets import TARGETS

    names = arguments.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        print(f"no target {unknown[0]!r}; choose from: {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    if arguments.only is not None:
        return _run_one(names[0], arguments.seed, arguments.only)
    print(f"{'parser':22} {'cases':>7} {'accepted':>9} {'refused':>8} {'unexpected':>10} {'slowest':>9} {'total':>8}")
    num_unexpected = sum(_report(name, arguments) for name in names)
    return 1 if num_unexpected else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="cases of each parser (default 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="parsers, as the report names them; default all")
    parser.add_argument("--only", type=int, metavar="CASE", help="run this case of the first target, in this process")
    parser.add_argument("--worker", type=int, metavar="FIRST_CASE", help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_one(name: str, seed: int, case: int) -> int:
    from fuzz_targets import TARGETS

    with tempfile.TemporaryDirectory(prefix="mindrlhf-fuzz-") as directory:
        TARGETS[name].prepare(Path(directory))(random.Random(f"{seed}/{name}/{case}"))
    print("accepted")
    return 0


def _work(arguments: argparse.Namespace) -> int:
    """Run the cases from ``--worker`` on; say in the progress file which one is under way, and print the outcome."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    from fuzz_cases import run_cases

    with open(arguments.progress, "r+b") as file:
        progress = mmap.mmap(file.fileno(), 8)
    with tempfile.TemporaryDirectory(prefix="mindrlhf-fuzz-") as directory, _quiet_libraries() as output:
        outcome = run_cases(
            arguments.targets[0], Path(directory), arguments.seed, range(arguments.worker, arguments.cases),
            lambda case: struct.pack_into("<q", progress, 0, case),
        )  # fmt: skip
        print(json.dumps(vars(outcome)), file=output)
    return 0


@contextlib.contextmanager
def _quiet_libraries():
    """Libraries print about damaged input on both streams; only the outcome is to appear."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output, open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        yield output


def _report(name: str, arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    totals = {"num_accepted": 0, "num_refused": 0}
    unexpected: list[tuple[int, str]] = []
    slowest = (0.0, -1)
    first = 0
    while first < arguments.cases:
        outcome, stopped_at, reason = _run_worker(name, first, arguments)
        if outcome is None:
            if stopped_at < first:
                raise SystemExit(f"{name}: no case was run: {reason}")
            # What came before the crash is run again without it, so that it is counted.
            unexpected.append((stopped_at, reason))
            before = _run_worker(name, first, argparse.Namespace(**{**vars(arguments), "cases": stopped_at}))[0]
            outcome = before or {"num_accepted": 0, "num_refused": 0, "unexpected": [], "slowest": (0.0, -1)}
            first = stopped_at + 1
        else:
            first = arguments.cases
        for key in totals:
            totals[key] += outcome[key]
        unexpected += map(tuple, outcome["unexpected"])
        slowest = max(slowest, tuple(outcome["slowest"]))
    print(
        f"{name:22} {arguments.cases:7,} {totals['num_accepted']:9,} {totals['num_refused']:8,} {len(unexpected):10} "
        f"{slowest[0] * 1000:6.0f} ms {time.monotonic() - started:6.0f} s",
        flush=True,
    )
    for case, error in sorted(unexpected)[:20]:
        print(f"    case {case}: {error}", flush=True)
    return len(unexpected)


def _run_worker(name: str, first: int, arguments: argparse.Namespace) -> tuple[dict | None, int, str]:
    """Return the outcome, or None with the case at which the worker ended and why."""
    with tempfile.NamedTemporaryFile(prefix="mindrlhf-fuzz-progress-") as progress:
        progress.write(struct.pack("<q", -1))
        progress.flush()
        command = [sys.executable, __file__, "--targets", name, "--seed", str(arguments.seed)]
        command += ["--cases", str(arguments.cases), "--worker", str(first), "--progress", progress.name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        stuck = _wait(process, Path(progress.name))
        output, errors = process.communicate()
        (case,) = struct.unpack("<q", Path(progress.name).read_bytes())
    if process.returncode == 0 and output:
        return json.loads(output), case, ""
    last_line = ([line for line in errors.splitlines() if line.strip()] or [""])[-1]
    reason = f"no end within {CASE_TIMEOUT_S:g} s" if stuck else f"exit code {process.returncode} {last_line}"
    return None, case, reason


def _wait(process: subprocess.Popen, progress: Path) -> bool:
    """Wait for the end of a worker; stop it, and return True, when one case takes too long."""
    case, since = b"", time.monotonic()
    while True:
        try:
            process.wait(timeout=1)
            return False
        except subprocess.TimeoutExpired:
            found = progress.read_bytes()
            if found != case:
                case, since = found, time.monotonic()
            elif time.monotonic() - since > CASE_TIMEOUT_S:
                process.kill()
                return True


if __name__ == "__main__":
    sys.exit(main())
