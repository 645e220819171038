"""Colours on terminals that have them, how wide lines may be, and texts of others that a terminal would obey."""

import os
import re
import shutil
from typing import TextIO

BOLD, DIM, RED, GREEN, YELLOW, RESET = "\033[1m", "\033[2m", "\033[31m", "\033[32m", "\033[33m", "\033[0m"
CLEAR_LINE = "\r\033[K"

# Controls but tab and line break, marks that turn the direction of writing, and halves of surrogates: print raises.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object) -> str:
    """Return a text in which what a terminal would obey is spelled out, as in ``\\x1b[2J``."""
    return _CONTROLS.sub(lambda match: ascii(match.group())[1:-1], str(text))


def width(stream: TextIO, default: int) -> int:
    """Return the columns of a stream's terminal, or of the terminal that shows a rank's log, which COLUMNS has."""
    is_known = stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size((default, 24)).columns if is_known else default


def has_colours(stream: TextIO) -> bool:
    """Return True if a stream shows colours: a terminal does, unless NO_COLOR or NO_COLOUR is set (https://no-color.org)."""
    is_unwanted = os.environ.get("NO_COLOR") or os.environ.get("NO_COLOUR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_unwanted


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return a text in a colour where the stream shows any."""
    return f"{colour}{text}{RESET}" if has_colours(stream) else text


def verdict_coloured(text: str, stream: TextIO) -> str:
    """Return a text with its verdict, "better" or "worse" at its end, in green or red."""
    for word, colour in (("better", GREEN), ("worse", RED)):
        if text.endswith(f": {word}"):
            return text.removesuffix(word) + coloured(word, colour, stream)
    return text
