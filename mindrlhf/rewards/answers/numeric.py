"""Numbers as people and models write them, compared as exact rationals.

``1,042``, ``1e-3``, ``\\frac{3}{4}``, ``1 3/4``, ``1.5 \\times 10^3``, ``0.1\\overline{6}``; ``1.234,56`` and other
languages' thousands, where only one reading is left. ``42%`` is ``42%``, ``42`` and ``0.42``.
"""

import functools
import re
import struct
from fractions import Fraction
from typing import NamedTuple

# Longer texts are not taken for numbers; it also bounds the work of every expression below.
MAX_NUMBER_CHARS = 64

_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)\s?[$€£¥]?\s?(?P<inner_sign>[-+]?)(?P<top>{_UNSIGNED})(?:\s?/\s?(?P<bottom>{_UNSIGNED}))?"
    r"\s?(?P<percent>%?)\.?"
)
_LATEX_FRACTION = re.compile(
    r"(?P<sign>[-+]?)\\[dt]?frac\s?(?:\{(?P<inner_sign>[-+]?)(?P<top>[0-9]+)\}\{(?P<bottom>[0-9]+)\}"
    r"|(?P<top_digit>[0-9])(?P<bottom_digit>[0-9]))(?P<percent>%?)\.?"
)
_MIXED = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>[0-9]+)(?:\s+(?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    r"|\s*\\[dt]?frac\{(?P<latex_top>[0-9]+)\}\{(?P<latex_bottom>[0-9]+)\})"
)
_SCIENTIFIC = re.compile(
    r"(?P<sign>[-+]?)(?P<factor>[0-9]+(?:\.[0-9]+)?)\s*(?:\\times|\\cdot|\*|\u00d7)\s*10\^(?:\{(?P<braced>[-+]?[0-9]{1,3})\}"
    r"|(?P<bare>[-+]?[0-9]{1,3}))"
)
_REPEATING = re.compile(r"(?P<sign>[-+]?)(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)\\overline\s*\{?(?P<period>[0-9]+)\}?")
_FOREIGN = re.compile(
    r"[-+]?[$€£¥]?(?:[0-9]{1,3}(?:\.[0-9]{3}){2,}(?:,[0-9]+)?|[0-9]{1,3}\.[0-9]{3},[0-9]+"
    r"|[0-9]{1,3}(?:[ '][0-9]{3})+,(?!0+$)[0-9]+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?:\.[0-9]+)?)"
)
_SPELLINGS = (("\u2212", "-"), ("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", ","), ("\\!", ""))


class Number(NamedTuple):
    """A number as written: ``value`` leaves the per cent sign aside, so ``42%`` has the value 42."""

    value: Fraction
    is_percentage: bool


def parse_number(text: str) -> Number | None:
    """Read the whole of ``text`` as one number, or return None. Linear time, whatever the text."""
    text = strip_decoration(text)
    return _parse(text) if text and len(text) <= MAX_NUMBER_CHARS else None


@functools.lru_cache(256)  # a response and its reference are read several times
def _parse(text: str) -> Number | None:
    if _FOREIGN.fullmatch(text):
        text = _in_english(text)
    for written, plain in _SPELLINGS:
        text = text.replace(written, plain)
    match = _PLAIN.fullmatch(text) or _LATEX_FRACTION.fullmatch(text)
    if match is None:
        return _parse_composed(text)
    groups = match.groupdict()
    if groups["sign"] and groups["inner_sign"]:
        return None
    value = _to_fraction(groups["top"] or groups["top_digit"])
    bottom = groups["bottom"] or groups.get("bottom_digit")
    if bottom:
        divisor = _to_fraction(bottom)
        if divisor == 0:
            return None
        value /= divisor
    if "-" in (groups["sign"], groups["inner_sign"]):
        value = -value
    return Number(value, bool(groups["percent"]))


def _parse_composed(text: str) -> Number | None:
    """Read a mixed number, one with a power of ten behind, or a repeating decimal."""
    match = _MIXED.fullmatch(text)
    if match is not None:
        top, bottom = match["top"] or match["latex_top"], match["bottom"] or match["latex_bottom"]
        if int(bottom) == 0:
            return None
        value = int(match["whole"]) + Fraction(int(top), int(bottom))
    elif (match := _REPEATING.fullmatch(text)) is not None:
        fixed, period = match["fixed"], match["period"]
        repeated = Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
        value = Fraction(f"{match['whole'] or 0}.{fixed or 0}") + repeated
    else:
        match = _SCIENTIFIC.fullmatch(text)
        if match is None:
            return None
        value = _to_fraction(match["factor"]) * Fraction(10) ** int(match["braced"] or match["bare"])
    return Number(-value if match["sign"] == "-" else value, is_percentage=False)


def numbers_equal(a: Number, b: Number) -> bool:
    """Return whether two numbers are the same, under the reading of per cent signs given above."""
    if a.value == b.value:
        return True
    if a.is_percentage == b.is_percentage:
        return False
    percentage, plain = (a, b) if a.is_percentage else (b, a)
    return percentage.value == plain.value * 100


def is_near(number: Number, reference: Number, tolerance: float) -> bool:
    """Return whether two numbers, both with a per cent sign or neither, differ by ``tolerance`` relatively at most."""
    if not tolerance or number.is_percentage != reference.is_percentage:
        return False
    return abs(number.value - reference.value) <= Fraction(tolerance) * abs(reference.value)


def is_float32_of(reference: Number, number: Number) -> bool:
    """Return whether ``reference`` is what single precision makes of ``number``: 0.10000000149011612 of 0.1."""
    if reference.value.denominator == 1:
        return False
    rounded = struct.unpack("f", struct.pack("f", float(number.value)))[0]
    return number.value == Fraction(f"{rounded:.7g}") and reference.value == Fraction(repr(rounded))


def _in_english(text: str) -> str:
    """``1.234,56`` as ``1234.56``."""
    if re.search(r"[. '].*,|\..*\.", text):
        return re.sub("[. ']", "", text).replace(",", ".")
    return text.replace(",", "")


def strip_decoration(text: str) -> str:
    """Drop the spaces, Markdown emphasis, LaTeX math delimiters and closing full stop around an answer."""
    text = text.strip().strip("*`").strip()
    if text.startswith("\\(") and text.endswith("\\)"):
        text = text[2:-2].strip()
    if len(text) > 1 and text.endswith("$") and not text.endswith("\\$"):
        text = text.strip("$").strip()
    return text


def _to_fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").removesuffix("."))
