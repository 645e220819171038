"""`mindrlhf tools`: the system prompt that describes tools to a model."""

import argparse


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the parser of this command."""
    parser = subparsers.add_parser("tools", help="print the system prompt that describes tools to a model")
    parser.add_argument("--names", required=True, help="as in tools.names, with commas between")
    parser.add_argument(
        "--instructions", default="You are a helpful assistant.", help="what the system prompt says first"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    from mindrlhf.tools.calls import system_prompt
    from mindrlhf.tools.registry import describe, resolve

    tools = resolve([name.strip() for name in arguments.names.split(",")])
    print(system_prompt([describe(name, tool) for name, tool in tools.items()], arguments.instructions))
    return 0
