"""Numbers with a unit behind: ``5 cm``, ``5\\text{ cm}``, ``30^\\circ``, ``12 square metres``, ``3 million dollars``.

A unit that only one of two answers has does not matter ("How many metres?" is answered by ``5``). Two measures must be
the same: ``5 cm`` is not ``5 km``. So must other words, but that one answer may have more of them than the other: "5
red apples" are "5 apples", a decrease is no increase. Nothing is converted: ``5 km`` is not ``5000 m``.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from mindrlhf.rewards.answers.numeric import Number, parse_number

# Longer texts are not taken for quantities.
MAX_QUANTITY_CHARS = 120

FACTORS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_TABLE = json.loads(Path(__file__).with_name("units.json").read_text(encoding="utf-8"))
NAMES = {name: unit for unit, names in _TABLE.items() for name in (unit, *names.split("|"))}
# Conjunctions and functions join two values; they are no unit of the first.
_NO_UNITS = {"and", "or", "to", "mod", "times", "over", "plus", "minus", "sqrt", "log", "sin", "cos", "tan", "exp"}

_PROSE = {"in", "min", "m", "s", "h", "day", "days", "K", "n", "j", "w", "v"}

_QUANTITY = re.compile(
    r"(?P<number>[^A-Za-z\\°^]*[0-9.%]|[-+]?[0-9]*\s*\\[dt]?frac\{[0-9]+\}\{[0-9]+\})"
    r"(?P<space>(?:\s|~|\\[ ,;!])*)"
    r"(?:\\(?:text|textrm|mathrm|mbox|rm)\s*\{(?P<text>[^{}]*(?:\{[^{}]*\})?)\}(?P<text_power>(?:\^\{?[23]\}?)?)"
    r"|(?P<degrees>\^?\s*\{?(?:\\circ|°)\}?)(?:\s*\\?(?:text|mathrm)?\{?(?P<scale>[CFK])\}?)?"
    r"|(?P<plain>[A-Za-zµ][A-Za-z0-9 µ/^²³{}.]*))"
)
_OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_OTHER_BASE = re.compile(r"\b(?:base|binary|octal|hex|hexadecimal|mod)\b", re.IGNORECASE)
_MODULUS = re.compile(r"(?P<value>[^\\]+)\\(?:p?mod\s*\{(?P<braced>[^{}]+)\}|(?:b?mod|pmod)\s*(?P<bare>[0-9a-z]+))")
# "7 \\text{ (or 8)}" has a second thought behind it, and no unit.
_SECOND_THOUGHT = re.compile(
    r"\b(?:or|not|maybe|perhaps|no|reject(?:ed)?|wrong|incorrect|invalid|extraneous|discarded|false)\b|\b[0-9]",
    re.IGNORECASE,
)
# "42 more than x" is not 42.
_TURNED = re.compile(r"\b(?:than|times|from|minus|plus|short of|less|percent of)\s+\w", re.IGNORECASE)
_SMALL_WORDS = re.compile("an?|the|of|in|all|total|per|about|exactly|is|are|there")
_UNNAMED = re.compile("(?:square |cubic |sq )?units?")
_BEHIND = re.compile(
    r"(?P<value>[^ ].*?)(?:\s*\\(?:text|textrm|mathrm|mbox|rm)\s*\{(?P<text>[^{}]*)\}(?P<power>(?:\^\{?[23]\}?)?)"
    r"|(?P<degrees>\^?\s*\{?(?:\\circ|°)\s*\}?)|(?:(?<=[0-9})])|(?<=\\pi))\s+"
    r"(?P<plain>(?:square |cubic |sq )?[A-Za-zµ/]{1,20}(?:[²³]|\^\{?[23]\}?)?))"
)


class Quantity(NamedTuple):
    """A number, its unit (None without one, ``""`` for one that is no measure) and the other words behind it."""

    number: Number
    unit: str | None
    words: frozenset[str] = frozenset()


def parse_quantity(text: str) -> Quantity | None:
    """Read the whole of ``text`` as a number with or without a unit, or return None."""
    if len(text) > MAX_QUANTITY_CHARS:
        return None
    number = parse_number(text)
    if number is not None:
        return Quantity(number, "money" if "$" in text and not text.startswith("$$") else None)
    match = _QUANTITY.fullmatch(text)
    number = parse_number(match["number"]) if match is not None else None
    if number is None:
        return None
    if match["degrees"]:
        return Quantity(number, "deg" + (match["scale"] or ""))
    if match["text"] is not None:
        return _with_unit(number, match["text"] + match["text_power"], is_marked=True, is_apart=True)
    return _with_unit(number, match["plain"], is_marked=False, is_apart=bool(match["space"]))


def units_fit(unit: str | None, other: str | None) -> bool:
    """Return whether two answers may have these units, under the rules above."""
    return not unit or not other or unit == other or {unit, other} < {"money", "usd", "eur"}


def words_fit(words: frozenset[str], others: frozenset[str]) -> bool:
    """Return whether two answers may have these words behind their numbers: those of one are among the other's."""
    return words <= others or others <= words


def is_measure(words: str) -> bool:
    """Return whether ``words`` name a known unit of measure; ``a``, ``in`` and the like are words of prose."""
    return words.lower() not in _PROSE and measure(words) is not None


def split_unit(text: str) -> tuple[str, str]:
    """An expression and the measure behind it: ``5\\sqrt{2}`` and ``cm``; ``""`` without one."""
    modulus = _MODULUS.fullmatch(text)
    if modulus is not None:
        return modulus["value"].strip(), f"mod {(modulus['braced'] or modulus['bare']).strip()}"
    match = _BEHIND.fullmatch(text)
    if match is None or (match["degrees"] and _OF_AN_ANGLE.search(text)):
        return text, ""
    words = match["text"] + match["power"] if match["text"] is not None else match["plain"] or ""
    if _OTHER_BASE.search(words):
        return text, ""
    unit = "deg" if match["degrees"] else measure(words)
    if unit is None and (_SECOND_THOUGHT.search(words) or (match["text"] is None and not _UNNAMED.fullmatch(words))):
        return text, ""
    return match["value"].strip(), unit or ("" if _UNNAMED.fullmatch(words.strip()) else words.strip().lower())


def _with_unit(number: Number, words: str, is_marked: bool, is_apart: bool) -> Quantity | None:
    """``is_marked``: LaTeX says it is text, not algebra; ``is_apart``: there is a space between number and unit."""
    if _OTHER_BASE.search(words):
        return None
    first, _, rest = words.strip().partition(" ")
    if first.lower() in FACTORS and is_apart:
        number = Number(number.value * FACTORS[first.lower()], number.is_percentage)
        words = rest
        if not words:
            return Quantity(number, None)
    unit = measure(words)
    if unit is not None:
        # "5m" may be five times m, "5cm" is not meant as a product.
        return Quantity(number, unit) if is_marked or is_apart or len(words.strip()) > 1 else None
    if _SECOND_THOUGHT.search(words):
        return None
    letters = words.split()
    if _TURNED.search(words):
        return None
    is_word = bool(letters) and all(word.isalpha() for word in letters) and not _NO_UNITS & {w.lower() for w in letters}
    if not is_marked and not (is_word and is_apart and len(letters[0]) > 2):
        return None
    units = [unit for unit in map(_name, letters) if unit]
    return Quantity(number, units[0] if units and _name(letters[0]) else "", _other_words(letters))


def _other_words(letters: list[str]) -> frozenset[str]:
    """The words that say of what a number is, without articles and the like, in the singular."""
    plain = (re.sub("[^a-z]", "", word.lower()) for word in letters if not _name(word))
    return frozenset(word.removesuffix("s") for word in plain if word and not _SMALL_WORDS.fullmatch(word))


def measure(words: str) -> str | None:
    """The one way we write a unit of measure, such as ``cm^2``; None when it is none that we know."""
    words = words.strip().rstrip(".").replace("²", "^2").replace("³", "^3").replace("{", "").replace("}", "")
    words = re.sub(r"\s+per\s+", "/", words)
    words = re.sub(r"(?:\s|\*|\\cdot )+([a-z]+)\^?-([1-3])$", r"/\1^\2", words).removesuffix("^1")
    power = ""
    for prefix, exponent in (("square ", "^2"), ("sq ", "^2"), ("sq. ", "^2"), ("cubic ", "^3")):
        if words.lower().startswith(prefix):
            words, power = words[len(prefix) :], exponent
    if words[-2:] in ("^2", "^3"):
        words, power = words[:-2], words[-2:]
    if words == "miles/hour":
        return "mph"
    parts = [_name(part) for part in words.split("/")]
    return "/".join(parts) + power if all(parts) else None


def _name(word: str) -> str | None:
    for form in (word, word.lower(), word.lower().removesuffix("s")):
        # "S" and "G" are other units than "s" and "g".
        if form in NAMES and (form == word or len(word) > 2):
            return NAMES[form]
    return None
