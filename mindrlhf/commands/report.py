"""``mindrlhf report`` and ``mindrlhf view``: pages to look at a run and at what its model wrote."""

import argparse
import sys
from pathlib import Path


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("report", help="write the HTML report of a run")
    parser.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="directory of the run, with metrics.jsonl; several are drawn over each other, seeds as their mean",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="where to write it, - for standard output (default: RUN_DIR/report.html)"
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="write the learning curve alone, of seeds their mean, as a picture (-: print it)"
    )
    parser.set_defaults(run=_report)
    view = subparsers.add_parser("view", help="write a page to read a run's samples, or two runs' side by side")
    view.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run; two are compared")
    view.add_argument(
        "--output", metavar="FILE", help="where to write it, - for standard output (default: RUN_DIR/samples.html)"
    )
    view.add_argument(
        "--steps", metavar="FIRST:LAST", type=_steps, default=(0, 1 << 62), help="those of these steps only"
    )
    view.set_defaults(run=_view)


def _report(arguments: argparse.Namespace) -> int:
    """Write the report, or the learning curve, and print its path."""
    from mindrlhf.errors import UserError
    from mindrlhf.observe.learning_curve import learning_curve_svg
    from mindrlhf.observe.records import replace_file
    from mindrlhf.observe.report import COMPARISON_NAME, REPORT_NAME, group_runs, render_report
    from mindrlhf.observe.run_data import read_run
    from mindrlhf.system.run_lock import is_held

    run_dir, *others = arguments.run_dirs
    if keys := [str(one) for one in others if "=" in str(one) and not one.exists()]:
        raise UserError(f"'{keys[0]}' is no run directory, and this command has no config to set keys of")
    runs, output = [read_run(path) for path in arguments.run_dirs], arguments.output
    if arguments.svg is None:
        text = render_report(runs, is_running=not others and is_held(run_dir))
    elif len(group_runs(runs)) > 1:
        raise UserError("--svg draws one curve, and these runs differ in more than their seeds: leave it out")
    else:
        text, output = learning_curve_svg(runs), arguments.svg
    if output == "-":
        print(text.rstrip("\n"))
        return 0
    path = Path(output or run_dir / (COMPARISON_NAME if others else REPORT_NAME))
    replace_file(path, text)
    print(path)
    return 0


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"'{text}' is no range: write FIRST:LAST, as in 90:100")
    return int(first or 0), int(last or 1 << 62)


def _view(arguments: argparse.Namespace) -> int:
    """Write the page of samples and print its path."""
    from mindrlhf.errors import UserError
    from mindrlhf.launch.stages import signs_of_life
    from mindrlhf.observe.records import replace_file
    from mindrlhf.observe.report import SAMPLES_PAGE
    from mindrlhf.observe.viewer.page import render_page

    if len(arguments.run_dirs) > 2:
        raise UserError(f"{len(arguments.run_dirs)} runs were given: one is shown alone, two side by side")
    with signs_of_life("reading the samples", sys.stderr):
        text = render_page(arguments.run_dirs, arguments.steps)
    if arguments.output == "-":
        print(text)
        return 0
    path = Path(arguments.output or arguments.run_dirs[0] / SAMPLES_PAGE)
    replace_file(path, text)
    print(path)
    return 0
