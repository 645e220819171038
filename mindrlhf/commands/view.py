"""``mindrlhf view``: read what a model wrote in training."""

import argparse
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``view`` command."""
    parser = subparsers.add_parser("view", help="write a page to read the samples of a run, or of two side by side")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="directory of a run; two are compared")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write it (default: RUN/samples.html)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from mindrlhf.errors import UserError
    from mindrlhf.observe.viewer.page import write_page

    if len(arguments.run_dirs) > 2:
        raise UserError(f"{len(arguments.run_dirs)} runs were given: one is shown alone, two side by side")
    print(write_page(arguments.run_dirs, arguments.output or arguments.run_dirs[0] / "samples.html"))
    return 0
