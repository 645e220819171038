"""Numbers with a unit behind: ``5 cm``, ``5\\text{ cm}``, ``30^\\circ``, ``12 square metres``, ``3 million dollars``.

A unit that only one of two answers has does not matter ("How many metres?" is answered by ``5``), nor does one that
is no measure ("apples"). Two measures must be the same: ``5 cm`` is not ``5 km``. Nothing is converted:
``5 km`` is not ``5000 m``.
"""

import re
from typing import NamedTuple

from mindrlhf.rewards.answers.numeric import Number, numbers_equal, parse_number

# Longer texts are not taken for quantities.
MAX_QUANTITY_CHARS = 120

_FACTORS = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SPELLINGS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gramme",
    "kg": "kilogram kilo",
    "lb": "pound lbs",
    "oz": "ounce",
    "ms": "millisecond",
    "s": "second sec",
    "min": "minute mins",
    "h": "hour hr",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year yr",
    "ml": "milliliter millilitre mL",
    "l": "liter litre L",
    "usd": "dollar USD",
    "cent": "cent",
    "eur": "euro EUR",
    "mph": "mph",
    "km/h": "kph kmph kilometers/hour",
    "m/s": "meters/second",
    "deg": "degree deg",
    "rad": "radian",
    "K": "kelvin",
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
}
_NAMES = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}
# Conjunctions and functions join two values; they are no unit of the first.
_NO_UNITS = {"and", "or", "to", "mod", "times", "over", "plus", "minus", "sqrt", "log", "sin", "cos", "tan", "exp"}

_QUANTITY = re.compile(
    r"(?P<number>[^A-Za-z\\°^]*[0-9.%]|[-+]?[0-9]*\\[dt]?frac\{[0-9]+\}\{[0-9]+\})"
    r"(?P<space>(?:\s|~|\\[ ,;!])*)"
    r"(?:\\(?:text|textrm|mathrm|mbox|rm)\s*\{(?P<text>[^{}]*)\}(?P<text_power>\^?\{?[23]?\}?)"
    r"|(?P<degrees>\^?\s*\{?(?:\\circ|°)\}?)(?:\s*\\?(?:text|mathrm)?\{?(?P<scale>[CFK])\}?)?"
    r"|(?P<plain>[A-Za-zµ][A-Za-z0-9 µ/^²³{}.]*))"
)


class Quantity(NamedTuple):
    """A number and its unit; ``unit`` is None without one, ``""`` for one that is no measure."""

    number: Number
    unit: str | None


def parse_quantity(text: str) -> Quantity | None:
    """Read the whole of ``text`` as a number with or without a unit, or return None."""
    if len(text) > MAX_QUANTITY_CHARS:
        return None
    number = parse_number(text)
    if number is not None:
        return Quantity(number, None)
    match = _QUANTITY.fullmatch(text)
    number = parse_number(match["number"]) if match is not None else None
    if number is None:
        return None
    if match["degrees"]:
        return Quantity(number, "deg" + (match["scale"] or ""))
    if match["text"] is not None:
        return _with_unit(number, match["text"] + match["text_power"], is_marked=True, is_apart=True)
    return _with_unit(number, match["plain"], is_marked=False, is_apart=bool(match["space"]))


def quantities_equal(a: Quantity, b: Quantity) -> bool:
    """Whether two quantities are the same, under the rules above."""
    return numbers_equal(a.number, b.number) and (not a.unit or not b.unit or a.unit == b.unit)


def _with_unit(number: Number, words: str, is_marked: bool, is_apart: bool) -> Quantity | None:
    """``is_marked``: LaTeX says it is text, not algebra; ``is_apart``: there is a space between number and unit."""
    first, _, rest = words.strip().partition(" ")
    if first.lower() in _FACTORS and is_apart:
        number = Number(number.value * _FACTORS[first.lower()], number.is_percentage)
        words = rest
        if not words:
            return Quantity(number, None)
    unit = _measure(words)
    if unit is not None:
        # "5m" may be five times m, "5cm" is not meant as a product.
        return Quantity(number, unit) if is_marked or is_apart or len(words.strip()) > 1 else None
    letters = words.split()
    is_word = bool(letters) and all(word.isalpha() for word in letters) and not _NO_UNITS & {w.lower() for w in letters}
    if is_marked or (is_word and is_apart and len(letters[0]) > 2):
        return Quantity(number, "")
    return None


def _measure(words: str) -> str | None:
    """The one way we write a unit of measure, such as ``cm^2``; None when it is none that we know."""
    words = words.strip().rstrip(".").replace("²", "^2").replace("³", "^3").replace("{", "").replace("}", "")
    words = re.sub(r"\s+per\s+", "/", words)
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
        if form in _NAMES and (form == word or len(word) > 2):
            return _NAMES[form]
    return None
