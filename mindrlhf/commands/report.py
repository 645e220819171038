"""``mindrlhf report``: the HTML report of a run."""

import argparse
from pathlib import Path

from mindrlhf.commands.vocabulary import add_aliases


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``report`` command."""
    parser = subparsers.add_parser("report", help="write the HTML report of a run")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run, with metrics.jsonl")
    output = parser.add_argument(
        "--output", metavar="FILE", help="where to write it, - for standard output (default: RUN_DIR/report.html)"
    )
    add_aliases(parser, output, "--out")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the learning curve alone, as a picture")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the report, or the learning curve, and print its path."""
    from mindrlhf.observe.learning_curve import write_learning_curve
    from mindrlhf.observe.report import render_report, write_report
    from mindrlhf.observe.run_data import read_run

    if arguments.svg is not None:
        print(write_learning_curve(arguments.run_dir, arguments.svg))
        return 0
    if arguments.output == "-":
        print(render_report(read_run(arguments.run_dir)))
        return 0
    print(write_report(arguments.run_dir, Path(arguments.output) if arguments.output else None))
    return 0
