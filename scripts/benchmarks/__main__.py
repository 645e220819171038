"""Benchmarks on CPUs: one harness, eight cases.

    .venv/bin/python scripts/benchmarks CASE [--smallest] [--repeats 3] [--any-core] [--out figures.json]

Each case is the module of its name, whose ``measure`` yields rows of figures; what it measures is in its docstring. Run
nothing beside it.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

CASES = {
    "trl": "against_trl",
    "update": "update",
    "weights": "weights",
    "checkpoint": "checkpoint",
    "rewards": "rewards",
    "rollout": "rollout",
    "agents": "agents",
    "growth": "growth",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--smallest", action="store_true", help="the smallest size of the case, once")
    parser.add_argument("--repeats", type=int, default=3, help="turns, or measurements of a size (default 3)")
    parser.add_argument("--any-core", action="store_true", help="do not hold the case to one core")
    parser.add_argument("--out", type=Path, help="write the figures as JSON too")
    arguments = parser.parse_args()
    case = importlib.import_module(CASES[arguments.case])
    if getattr(case, "ONE_CORE", False) and not arguments.any_core:
        # Limits on threads are not enough: MindSpore computes elementwise work on a second thread whatever they are.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows, widths = [], []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        for row in case.measure(Path(directory), arguments.smallest, 1 if arguments.smallest else arguments.repeats):
            if not rows:
                widths = [max(len(name), 12) for name in row]
                print("  ".join(name.rjust(width) for name, width in zip(row, widths)))
            print("  ".join(_text(value).rjust(width) for value, width in zip(row.values(), widths)), flush=True)
            rows.append(row)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
