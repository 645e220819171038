"""The end of a log, for the message that says why its process failed."""

from collections.abc import Callable
from pathlib import Path

_TAIL_BYTES = 1 << 20


def last_lines(path: Path, num_lines: int, is_worth_showing: Callable[[str], bool] = lambda line: True) -> list[str]:
    """Return the last lines of a log that are not blank and worth showing; none when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line.strip() and is_worth_showing(line)][-num_lines:]
