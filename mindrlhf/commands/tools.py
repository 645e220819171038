"""`mindrlhf tools`: the system prompt that describes tools to a model."""

import argparse

from mindrlhf.commands.vocabulary import allow_json


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tools", help="print the system prompt that describes tools to a model")
    parser.add_argument("--names", required=True, help="as in tools.names, with commas between")
    parser.add_argument(
        "--instructions", default="You are a helpful assistant.", help="what the system prompt says first"
    )
    allow_json(parser)
    parser.add_argument(
        "--keep", default="", metavar="[NAME=]KEY,...", help="as in 'data build': these parameters are not the model's"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it; with ``--json`` the tools' schemas, for a chat template that describes them itself."""
    import json

    from mindrlhf.data.handlers import parse_columns
    from mindrlhf.tools.calls import system_prompt
    from mindrlhf.tools.registry import describe, resolve

    tools = resolve([name.strip() for name in arguments.names.split(",")])
    columns = parse_columns(arguments.keep) if arguments.keep else {}
    descriptions = [describe(name, tool, columns) for name, tool in tools.items()]
    print(json.dumps(descriptions) if arguments.json else system_prompt(descriptions, arguments.instructions))
    return 0
