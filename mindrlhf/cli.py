"""The ``mindrlhf`` command: dispatch to one thin sub-command per user task."""

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import mindrlhf
from mindrlhf.config.keys import MAX_INTEGER, MAX_NUMBER, TASKS, nearest_choice
from mindrlhf.errors import STOPPED, RunFailure, UserError, messages_of
from mindrlhf.system.processes import prepare_children
from mindrlhf.system.terminal import RED, coloured, visible

COMMANDS = (
    "doctor",
    "data",
    "models",
    "weights",
    "train",
    "eval",
    "rewards",
    "tools",
    "report",
    "diff",
    "config",
    "plan",
    "strategy",
    "completion",
)
_MAX_SHOWN_CHARS = 60
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_PATH_ERRORS = (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
_COUNTS = ("--workers", "--world-size", "--nodes", "--node-size", "--processes", "--threads", "--tensor-parallel")
_COUNTS += ("--max-prompt-length", "--max-length", "--num-samples", "--min-pixels", "--max-pixels", "--size")
LEAST = dict.fromkeys(_COUNTS, 1) | dict.fromkeys(
    ("--port", "--seed", "--num", "--npus", "--lora", "--max-restarts", "--spares", "--max-prompts"), 0
)
_CLOSED_PIPE = 141  # of a program that SIGPIPE ends, as a shell sees it


class BadWord(Exception):
    """A word of the command line is refused; no ValueError, which argparse words itself."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that says what was meant."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # noqa: D102
        self._words = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> None:
        """Print the line and end the process; where an option is missing, it may be one that is misspelled."""
        for word in (word for word in self._words if word.startswith("--") and "required" in message):
            if hint := _meant(word, self, False) if word.partition("=")[0] not in self._option_string_actions else "":
                message = f"unrecognized arguments: {word}{hint}"
        self.exit(2, f"{self.prog}: error: {visible(message)}; see {self.prog} --help\n")

    def _get_value(self, action: argparse.Action, text: str) -> object:
        value = super()._get_value(action, text)
        most = MAX_INTEGER if isinstance(value, int) else MAX_NUMBER
        if isinstance(value, (int, float)) and not abs(value) <= most:
            shown = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
            raise argparse.ArgumentError(action, f"{shown} is no number from {-most:.10g} to {most:.10g}")
        least = LEAST.get(action.option_strings[0]) if action.option_strings else None
        if least is not None and isinstance(value, int) and value < least:
            raise BadWord(f"{action.option_strings[0]} is {value}: give {least} or more")
        return value

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if not choices or value in action.choices:
            return
        near = nearest_choice(value, choices)
        hint = f"did you mean {near}?" if near else f"one of {', '.join(choices)} is expected"
        raise argparse.ArgumentError(action, f"'{value}' is not known; {hint}")


def build_parser() -> Parser:
    """Return the parser with every sub-command registered."""
    parser = Parser(prog="mindrlhf", description=(mindrlhf.__doc__ or "MindRLHF").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"mindrlhf {mindrlhf.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"mindrlhf.commands.{name}").register(subparsers)
    return parser


def _begin_in_utf8() -> None:
    """Begin again in Python's UTF-8 mode, for all children too, where the locale (C, GBK) would read paths otherwise.

    Libraries take paths as UTF-8, which they are on Linux whatever the locale says.
    """
    if sys.getfilesystemencoding().lower() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; expected failures print one line each, not a traceback."""
    if argv is None:
        _begin_in_utf8()
        if sys.argv[1:2] and sys.argv[1] in TASKS:
            signal.signal(signal.SIGTERM, _stop)
    prepare_children()
    try:
        arguments = _parse(argv)
    except BadWord as error:
        print(f"mindrlhf {' '.join((sys.argv[1:] if argv is None else argv)[:1])}: error: {error}", file=sys.stderr)
        return UserError.exit_code
    try:
        with _signs_of_life(getattr(arguments, "says", None)):
            code = arguments.run(arguments) or 0
        sys.stdout.flush()
        return code
    except (UserError, RunFailure) as failure:
        for line in messages_of(failure):
            error = coloured("error:", RED, sys.stderr)
            print(f"mindrlhf {arguments.command}: {error} {visible(line)}", file=sys.stderr)
        return failure.exit_code
    except BrokenPipeError:
        _drop_output()  # whoever read it has gone, as `head` does
        return _CLOSED_PIPE
    except (KeyboardInterrupt, ImportError) as error:
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
            print(f"mindrlhf {arguments.command}: interrupted", file=sys.stderr)
            if "mindspore" not in sys.modules and any(name.startswith("mindspore.") for name in sys.modules):
                os._exit(130)  # what clears up after an import that was broken off aborts
            return 130
        if not isinstance(error, ModuleNotFoundError) or (error.name or "mindrlhf").startswith("mindrlhf"):
            raise
        line = f"{sys.executable} has no {error.name}: use .venv/bin/mindrlhf"
        print(f"mindrlhf {arguments.command}: error: {line}", file=sys.stderr)
        return UserError.exit_code
    except OSError as error:
        if error.errno not in (*_DISK_ERRORS, *_PATH_ERRORS):
            raise
        _drop_output()
        where, what = str(error.filename2 or error.filename or "the output"), "cannot be written"
        if error.errno == errno.ENAMETOOLONG:  # of the config, or the command line
            where, what = f"{where[:80]}... ({len(where)} characters)", "is no path that can be used"
        print(f"mindrlhf {arguments.command}: error: {where} {what}: {error.strerror}", file=sys.stderr)
        return UserError.exit_code


def _stop(number: int, _: object) -> None:
    """End a run that has no ranks yet, or no more: it is not done."""
    signal.signal(number, signal.SIG_IGN)  # schedulers signal a job and its step
    print("mindrlhf: SIGTERM received: the run ends", file=sys.stderr, flush=True)
    sys.exit(STOPPED)


def _drop_output() -> None:
    """Have what standard output still holds go nowhere when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _signs_of_life(what: str | None) -> contextlib.AbstractContextManager[None]:
    """Have a command that takes long say so on standard error; ``what`` is None for those that speak themselves."""
    from mindrlhf.launch.stages import signs_of_life

    return signs_of_life(what, sys.stderr) if what else contextlib.nullcontext()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides (section.key=value) may stand before, between and after options."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    arguments, rest = parser.parse_known_args(words)
    if not rest:
        return arguments
    chosen = _chosen_parser(parser, words)
    for word in rest:
        if word.startswith("-"):
            chosen.error(f"unrecognized arguments: {word}{_meant(word, chosen, 'overrides' in arguments)}")
    if "overrides" not in arguments:
        hint = "this command has no config to set keys of" if "=" in rest[0] else "quote a text that has spaces"
        chosen.error(f"unrecognized arguments: {' '.join(rest)}; {hint}")
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _meant(word: str, parser: argparse.ArgumentParser, takes_keys: bool) -> str:
    """Return the end of a message that names the key or the option that is nearest to an unknown option."""
    from mindrlhf.config import schema  # noqa: F401 - registers the keys
    from mindrlhf.config.parse import nearest_key

    name = word.lstrip("-").partition("=")[0]
    key = nearest_key(name.replace("-", "_")) if takes_keys else None
    is_key = key is not None and key.endswith(f".{name.replace('-', '_')}")
    option, options = f"--{name.replace('_', '-')}", parser._option_string_actions
    near = difflib.get_close_matches(option, options, n=1, cutoff=0.8 if is_key else 0.6)
    near += [f"{key}=VALUE (keys of the config have no dashes)"] if is_key else []
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _chosen_parser(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the sub-command, or of its action, that the first words name."""
    for word in words:
        actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not actions or word not in actions[0].choices:
            break
        parser = actions[0].choices[word]
    return parser


if __name__ == "__main__":
    sys.exit(main())
