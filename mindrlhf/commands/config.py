"""`mindrlhf config`: check a config file, or print the reference of all keys."""

import argparse
import sys
from pathlib import Path

from mindrlhf.system.files import write_file


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser("config", help="check a config file, or print the reference of all keys")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="check a config without touching a device")
    check.add_argument("config", help="YAML file")
    check.add_argument("overrides", nargs="*", metavar="section.key=value")
    kinds = ("train", "sft", "dpo", "reward-model")
    check.add_argument("--kind", choices=kinds, default="train", help="command the config is for")
    check.add_argument("--workers", type=int, default=1, help="number of ranks it is to run on")
    check.set_defaults(run=_check)
    taken = actions.add_parser("import", help="write another stack's config as one of ours")
    taken.add_argument("--from", dest="stack", required=True, choices=("mindspeed-rl", "mindrlhf", "verl", "trl"))
    taken.add_argument("file", type=Path, help="its YAML file, or a shell script with section.key=value words")
    taken.add_argument("--output", type=Path, help="where to write ours; standard output without it, and with -")
    taken.add_argument("--workers", type=int, default=1, help="ranks it ran on; TRL counts batches by them")
    taken.set_defaults(run=_import)
    docs = actions.add_parser("docs", help="print the reference page (docs/config.md)")
    docs.set_defaults(run=_docs)


def _check(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.load import CONFIG_LOADERS

    CONFIG_LOADERS[arguments.kind](arguments.config, arguments.overrides, world_size=arguments.workers)
    print(f"{arguments.config}: ok for {arguments.workers} rank{'s' if arguments.workers > 1 else ''}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.imports.convert import convert

    text, result = convert(arguments.stack, arguments.file, arguments.workers)
    if arguments.output in (None, Path("-")):
        print(text, end="")
    else:
        write_file(arguments.output, text)
    for name, advice in result.for_user.items():
        print(f"mindrlhf config: {name}: {advice}", file=sys.stderr)
    for name in result.unknown:
        print(f"mindrlhf config: {name}: unknown, left out", file=sys.stderr)
    return 0


def _docs(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.reference import render

    print(render(), end="")
    return 0
