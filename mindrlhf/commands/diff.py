"""``mindrlhf diff``: the first step and thing in which two runs differ."""

import argparse
import dataclasses
import json
from pathlib import Path

from mindrlhf.commands.vocabulary import allow_json


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``diff`` command."""
    parser = subparsers.add_parser("diff", help="name the first step and thing in which two runs differ")
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="directory of a run, with trajectory.jsonl")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="directory of the other")
    allow_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the difference; return 0 when the runs are the same as far as both go, 1 when not."""
    from mindrlhf.debugging.run_diff import compare_runs

    first, second = arguments.run_a, arguments.run_b
    difference = compare_runs(first, second)
    if arguments.json:
        print(json.dumps({"is_same": difference.is_same} | dataclasses.asdict(difference), indent=1))
        return 0 if difference.is_same else 1
    num_common = min(difference.num_steps)
    if difference.is_same:
        print(f"the same up to step {num_common}")
        for run_dir, num_steps in zip((first, second), difference.num_steps):
            if num_steps > num_common:
                print(f"  {run_dir} goes on to step {num_steps}")
    elif difference.step is None:
        print(f"the same up to step {num_common}, but the files of the {difference.part} differ")
    else:
        print(f"step {difference.step}: {difference.part} differ first")
    print("".join(f"  {line}\n" for line in difference.details), end="")
    return 0 if difference.is_same else 1
