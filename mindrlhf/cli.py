"""The ``mindrlhf`` command: dispatch to one thin sub-command per user task."""

import argparse
import importlib
import sys

import mindrlhf
from mindrlhf.errors import RunFailure, UserError, messages_of

COMMANDS = (
    "doctor",
    "data",
    "weights",
    "train",
    "eval",
    "rewards",
    "tools",
    "report",
    "view",
    "diff",
    "replay",
    "config",
    "plan",
    "strategy",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every sub-command registered."""
    parser = argparse.ArgumentParser(prog="mindrlhf", description=mindrlhf.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"mindrlhf {mindrlhf.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"mindrlhf.commands.{name}").register(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; expected failures print one line, not a traceback."""
    arguments = _parse(argv)
    try:
        return arguments.run(arguments) or 0
    except (UserError, RunFailure) as failure:
        lines = messages_of(failure) if isinstance(failure, UserError) else [str(failure)]
        for line in lines:
            print(f"mindrlhf {arguments.command}: error: {line}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print(f"mindrlhf {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides (section.key=value) may stand before, between and after options."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") or "=" not in word for word in rest) or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
