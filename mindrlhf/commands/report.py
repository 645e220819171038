"""``mindrlhf report``: the HTML report of a run."""

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``report`` command."""
    parser = subparsers.add_parser("report", help="write the HTML report of a run")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run, with metrics.jsonl")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: RUN_DIR/report.html)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its path."""
    from mindrlhf.observe.report import write_report

    print(write_report(arguments.run_dir, arguments.out))
    return 0
