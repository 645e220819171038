"""``mindrlhf report`` and ``mindrlhf view``: pages to look at a run and at what its model wrote."""

import argparse
from pathlib import Path

from mindrlhf.commands.vocabulary import add_aliases


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("report", help="write the HTML report of a run")
    parser.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="directory of the run, with metrics.jsonl; of several: their curves over each other",
    )
    output = parser.add_argument(
        "--output", metavar="FILE", help="where to write it, - for standard output (default: RUN_DIR/report.html)"
    )
    add_aliases(parser, output, "--out")
    parser.add_argument("--svg", metavar="FILE", help="write the learning curve alone, as a picture (-: print it)")
    parser.set_defaults(run=_report)
    view = subparsers.add_parser(
        "view", help="write or serve a page to read a run's samples, or two runs' side by side"
    )
    view.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run; two are compared")
    view.add_argument(
        "--output", metavar="FILE", help="where to write it, - for standard output (default: RUN_DIR/samples.html)"
    )
    view.add_argument(
        "--serve", action="store_true", help="serve it to this machine until Ctrl-C; so are samples of over 64 MiB"
    )
    view.add_argument("--port", type=int, default=0, help="of --serve (default: a free one)")
    view.set_defaults(run=_view)


def _report(arguments: argparse.Namespace) -> int:
    """Write the report, or the learning curve, and print its path."""
    from mindrlhf.errors import UserError
    from mindrlhf.observe.learning_curve import learning_curve_svg, write_learning_curve
    from mindrlhf.observe.records import replace_file
    from mindrlhf.observe.report import COMPARISON_NAME, render_comparison, render_report, write_report
    from mindrlhf.observe.run_data import read_run
    from mindrlhf.system.run_lock import is_held

    run_dir, *others = arguments.run_dirs
    if keys := [str(one) for one in others if "=" in str(one) and not one.exists()]:
        raise UserError(f"'{keys[0]}' is no run directory, and this command has no config to set keys of")
    if others and arguments.svg is not None:
        raise UserError("--svg draws the curve of one run: give one, or leave it out")
    if arguments.svg == "-":
        print(learning_curve_svg(read_run(run_dir)), end="")
        return 0
    if arguments.svg is not None:
        print(write_learning_curve(run_dir, arguments.svg))
        return 0
    is_running = is_held(run_dir)
    if others or arguments.output == "-":
        runs = [read_run(one) for one in arguments.run_dirs]
        text = render_comparison(runs) if others else render_report(runs[0], is_running=is_running)
        path = Path(arguments.output or run_dir / COMPARISON_NAME)
        print(text) if arguments.output == "-" else (replace_file(path, text), print(path))
        return 0
    print(write_report(run_dir, Path(arguments.output) if arguments.output else None, is_running=is_running))
    return 0


def _view(arguments: argparse.Namespace) -> int:
    """Write the page of samples and print its path, or serve it and print where."""
    import sys

    from mindrlhf.errors import UserError
    from mindrlhf.launch.stages import signs_of_life
    from mindrlhf.observe.viewer.page import MAX_PAGE_BYTES, render_page, samples_path, write_page
    from mindrlhf.observe.viewer.server import SampleServer

    if len(arguments.run_dirs) > 2:
        raise UserError(f"{len(arguments.run_dirs)} runs were given: one is shown alone, two side by side")
    if not 0 <= arguments.port < 1 << 16:
        raise UserError(f"--port is {arguments.port}: give one from 1 to 65535, or 0 for a free one")
    if arguments.serve and arguments.output:
        raise UserError("--serve and --output were given: the page is served, or written to a file")
    num_bytes = sum(samples_path(path).stat().st_size for path in arguments.run_dirs)
    if arguments.serve or (arguments.output is None and num_bytes > MAX_PAGE_BYTES):
        server = SampleServer(arguments.run_dirs, arguments.port)
        print(f"{server.url} shows {num_bytes / 1e6:.0f} MB of samples; end with Ctrl-C", flush=True)
        server.run()
        return 0
    with signs_of_life("reading the samples", sys.stderr):
        if arguments.output == "-":
            print(render_page(arguments.run_dirs))
        else:
            print(write_page(arguments.run_dirs, Path(arguments.output or arguments.run_dirs[0] / "samples.html")))
    return 0
