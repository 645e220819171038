"""``mindrlhf report`` and ``mindrlhf view``: pages to look at a run and at what its model wrote."""

import argparse
from pathlib import Path

from mindrlhf.commands.vocabulary import add_aliases


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the commands."""
    parser = subparsers.add_parser("report", help="write the HTML report of a run")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run, with metrics.jsonl")
    output = parser.add_argument(
        "--output", metavar="FILE", help="where to write it, - for standard output (default: RUN_DIR/report.html)"
    )
    add_aliases(parser, output, "--out")
    parser.add_argument("--svg", metavar="FILE", help="write the learning curve alone, as a picture (-: print it)")
    parser.set_defaults(run=_report)
    view = subparsers.add_parser("view", help="write a page to read the samples of a run, or of two side by side")
    view.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run; two are compared")
    view.add_argument(
        "--output", metavar="FILE", help="where to write it, - for standard output (default: RUN_DIR/samples.html)"
    )
    view.set_defaults(run=_view, says="reading the samples")


def _report(arguments: argparse.Namespace) -> int:
    """Write the report, or the learning curve, and print its path."""
    from mindrlhf.observe.learning_curve import learning_curve_svg, write_learning_curve
    from mindrlhf.observe.report import render_report, write_report
    from mindrlhf.observe.run_data import read_run

    if arguments.svg == "-":
        print(learning_curve_svg(read_run(arguments.run_dir)), end="")
        return 0
    if arguments.svg is not None:
        print(write_learning_curve(arguments.run_dir, arguments.svg))
        return 0
    if arguments.output == "-":
        print(render_report(read_run(arguments.run_dir)))
        return 0
    print(write_report(arguments.run_dir, Path(arguments.output) if arguments.output else None))
    return 0


def _view(arguments: argparse.Namespace) -> int:
    """Write the page of samples and print its path."""
    from mindrlhf.errors import UserError
    from mindrlhf.observe.viewer.page import render_page, write_page

    if len(arguments.run_dirs) > 2:
        raise UserError(f"{len(arguments.run_dirs)} runs were given: one is shown alone, two side by side")
    if arguments.output == "-":
        print(render_page(arguments.run_dirs))
        return 0
    print(write_page(arguments.run_dirs, Path(arguments.output or arguments.run_dirs[0] / "samples.html")))
    return 0
