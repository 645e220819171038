"""``mindrlhf diff``: where two runs, or the dumps of two runs, part."""

import argparse
import dataclasses
import json
from pathlib import Path

from mindrlhf.commands.vocabulary import allow_json


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``diff`` command."""
    parser = subparsers.add_parser("diff", help="name the first step and thing in which two runs or dumps differ")
    parser.add_argument(
        "run_a", type=Path, metavar="RUN_A", help="directory of a run, with trajectory.jsonl, or a dump"
    )
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="directory of the other")
    allow_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the difference; return 0 when the runs are the same as far as both go, 1 when not."""
    from mindrlhf.debugging.dump_diff import is_dump
    from mindrlhf.debugging.dump_paths import DEFAULT_NAME

    pair = arguments.run_a, arguments.run_b
    if arguments.json:
        return _print_json(*pair)
    if all(map(is_dump, pair)):
        return _diff_dumps(*pair)
    code = _diff_runs(*pair)
    dumps = [directory / DEFAULT_NAME for directory in pair]
    return max(code, _diff_dumps(*dumps)) if all(map(is_dump, dumps)) else code


def _print_json(first: Path, second: Path) -> int:
    from mindrlhf.debugging.dump_diff import compare_dumps, is_dump
    from mindrlhf.debugging.dump_paths import DEFAULT_NAME
    from mindrlhf.debugging.run_diff import compare_runs

    found, dumps = {}, (first, second)
    if not all(map(is_dump, dumps)):
        found["runs"], dumps = compare_runs(first, second), (first / DEFAULT_NAME, second / DEFAULT_NAME)
    if all(map(is_dump, dumps)):
        found["dumps"] = compare_dumps(*dumps)
    plain = {name: {"is_same": one.is_same} | dataclasses.asdict(one) for name, one in found.items()}
    print(json.dumps(plain, indent=1))
    return 0 if all(one.is_same for one in found.values()) else 1


def _diff_runs(first: Path, second: Path) -> int:
    from mindrlhf.debugging.run_diff import compare_runs

    difference = compare_runs(first, second)
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


def _diff_dumps(first: Path, second: Path) -> int:
    from mindrlhf.debugging.dump_diff import compare_dumps

    difference = compare_dumps(first, second)
    if difference.is_same:
        print("the dumps are the same")
    else:
        print(
            f"dump: step {difference.step}, {difference.stage}, rank {difference.rank}: {difference.name} differs first"
        )
    lines = [*difference.details, *difference.one_sided]
    lines += [
        f"step {count.step}, {count.stage}: {count.num_different} of {count.num_compared} values differ"
        for count in difference.stages
        if count.num_different
    ]
    print("".join(f"  {line}\n" for line in lines), end="")
    return 0 if difference.is_same else 1
