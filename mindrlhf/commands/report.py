"""``mindrlhf report``: the HTML report of a run."""

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``report`` command."""
    parser = subparsers.add_parser("report", help="write the HTML report of a run")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run, with metrics.jsonl")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default: RUN_DIR/report.html)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the learning curve alone, as a picture")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the report, or the learning curve, and print its path."""
    from mindrlhf.observe.learning_curve import write_learning_curve
    from mindrlhf.observe.report import write_report

    if arguments.svg is not None:
        print(write_learning_curve(arguments.run_dir, arguments.svg))
        return 0
    print(write_report(arguments.run_dir, arguments.out))
    return 0
