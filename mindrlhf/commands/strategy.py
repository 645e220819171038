"""`mindrlhf strategy`: MindSpore strategy files of a run, compiled on any machine."""

import argparse

from mindrlhf.commands.vocabulary import add_cluster, add_overrides, allow_json, print_json


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("strategy", help="compile the training step of a cluster here; write strategy files")
    parser.add_argument("config", help="YAML file of `mindrlhf train`; of the model only config.json is read")
    add_overrides(parser)
    add_cluster(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="directory to make; must not exist")
    parser.add_argument(
        "--layers-per-stage",
        type=_layers,
        default="auto",
        metavar="K",
        help="layers of each stage to compile; the others are laid out like them; `all` compiles all (default: as few "
        "as there are kinds of layers)",
    )
    allow_json(parser)
    parser.set_defaults(run=_run, says="compiling")


def _layers(text: str) -> str | int:
    if text in ("auto", "all"):
        return text
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _run(arguments: argparse.Namespace) -> int:
    from mindrlhf.dryrun.compile.report import report_strategy

    report = report_strategy(
        arguments.config,
        arguments.overrides,
        world_size=arguments.workers,
        directory=arguments.output,
        layers_per_stage=arguments.layers_per_stage,
    )
    if arguments.json:
        return print_json(report.plain())
    print(*report.lines(), sep="\n")
    return 0
