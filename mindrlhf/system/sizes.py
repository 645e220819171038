"""Sizes as users write and read them, and files that must not be larger."""

import json
import re
from pathlib import Path

from mindrlhf.errors import UserError

# Of one JSON file of a model directory: the index of a model of 100,000 tensors has some 10 MiB.
MAX_FILE_BYTES = 64 << 20
_LEAST_BYTES = 1 << 20  # of a device's memory, or what a link sends in a second
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str, option: str) -> int:
    """Return the bytes that a text such as "64GB", "61.5 GiB" or "64e9" means; GB is 10^9 bytes, GiB 2^30.

    Raises:
        UserError: it is no positive size; ``option`` names where it was given.
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{0,15})?(?:e[0-9]{1,2})?)\s*([kmgt]i?b|)\s*", text.lower())
    size_bytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size_bytes <= 0:
        raise UserError(f"{option} {text!r} is not a size: write a number and a unit, such as 64GB or 60GiB")
    if size_bytes < _LEAST_BYTES:
        raise UserError(f"{option} {text!r} is {size_bytes:,} bytes: write a number and a unit, such as 64GB")
    return size_bytes


def format_size(size_bytes: float) -> str:
    """Return bytes in the largest decimal unit that leaves a number of at least 1, with three digits or more."""
    for unit, divisor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size_bytes) >= divisor:
            return f"{size_bytes / divisor:,.2f} {unit}"
    return f"{size_bytes:,.0f} B"


def read_bounded(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return what a file holds; a ValueError says that it is larger."""
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes >> 20} MiB")
    return content


def read_json_object(path: Path, fix: str = "", kind: type[UserError] = UserError) -> dict:
    """Return the JSON object in a file of bounded size; ``fix`` ends the message of an error.

    Raises:
        UserError: it cannot be read, or holds something else; of a class of its own, ``kind``.
    """
    fix = f": {fix}" if fix else ""
    try:
        fields = json.loads(read_bounded(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise kind(f"{path} cannot be read as JSON: {error}{fix}") from error
    if not isinstance(fields, dict):
        raise kind(f"{path} holds a {type(fields).__name__}, not a JSON object{fix}")
    return fields
