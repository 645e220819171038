"""`mindrlhf config`: check a config file, or print the reference of all keys."""

import argparse


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
    docs = actions.add_parser("docs", help="print the reference page (docs/config.md)")
    docs.set_defaults(run=_docs)


def _check(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.load import CONFIG_LOADERS
    from mindrlhf.training.vision_checks import check_device, check_text_only, check_vision

    config = CONFIG_LOADERS[arguments.kind](arguments.config, arguments.overrides, world_size=arguments.workers)
    if arguments.kind == "train":
        check_vision(config)
    elif arguments.kind == "sft":
        check_device(config.model, config.run)
    else:
        check_text_only(config.model, arguments.kind)
    print(f"{arguments.config}: ok for {arguments.workers} rank{'s' if arguments.workers > 1 else ''}")
    return 0


def _docs(arguments: argparse.Namespace) -> int:
    from mindrlhf.config.reference import render

    print(render(), end="")
    return 0
