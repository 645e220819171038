"""The words that all commands share: the same option means the same thing everywhere."""

import argparse
import sys
from pathlib import Path
from typing import Any

OVERRIDES_HELP = """\
section.key=value sets a key of the config for this run, as in run.max_steps=3 or training.sequence_lengths=[512,1024];
it wins over the file and may stand anywhere on the line. docs/config.md lists the keys."""


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Let a command take keys of its config, and say in its help how."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="set a key; see below")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = OVERRIDES_HELP


WORKERS_HELP = "trainer ranks on each machine"
CLUSTER_HELP = "devices of the cluster, on all its nodes together"


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a command is told the ranks of a run, as `train` is, without starting them."""
    parser.add_argument("--workers", type=int, default=1, metavar="N", help=f"{WORKERS_HELP}, as for train")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that they are on (default: 1)")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add ``--workers`` of a command that lays a run out over a cluster."""
    parser.add_argument("--workers", type=int, required=True, metavar="N", help=CLUSTER_HELP)


def allow_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which prints the result as one JSON object instead of text."""
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def print_json(found: Any) -> int:
    """Print a result as ``--json`` promises, and return the exit code of success."""
    import json

    print(json.dumps(found, indent=1, default=str))
    return 0


def model_directory(text: str) -> str:
    """The type of an argument that names a model or tokenizer directory, or a model of a hub that is in its cache."""
    from mindrlhf.hub.cache import local_directory

    return local_directory(text)


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--template-option``, whose values are pairs of a name and a JSON value."""
    parser.add_argument(
        "--template-option",
        action="append",
        default=[],
        type=template_option,
        metavar="NAME=JSON",
        help="a variable of the chat template, as in enable_thinking=false; may be given several times",
    )


def template_option(text: str) -> tuple[str, Any]:
    """Return ``("enable_thinking", False)`` for ``enable_thinking=false``."""
    import json

    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, as in enable_thinking=false, got {text!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"{text!r}: {value!r} is not JSON: write true, false, null, a number, or text in quotes: '{name}=\"...\"'"
        ) from None


def write_text(path: str, text: str, *, overwrite: bool = True) -> None:
    """Write a result to a file, whole or not at all, or to standard output when ``path`` is ``-``.

    Raises:
        UserError: the file is there and may not be overwritten, or cannot be written.
    """
    from mindrlhf.errors import UserError
    from mindrlhf.system.files import write_file

    if path == "-":
        sys.stdout.write(text)
        return
    if not overwrite and Path(path).exists():
        raise UserError(f"{path} exists: give another --output, or move it away")
    try:
        write_file(Path(path), text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    print(f"wrote {path}", file=sys.stderr)
