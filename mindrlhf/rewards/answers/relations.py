"""Inequalities, intervals and unions as sets of real numbers, and equations compared with equations."""

import re
from typing import Any

from mindrlhf.rewards.answers.expressions import constant, proportional
from mindrlhf.rewards.answers.forms import read_form, split

MAX_PIECES = 8

_SIGN = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|<|>|=")
_OR = re.compile(r"\\(?:cup|lor|vee)(?![A-Za-z])|\\(?:text|mathrm)\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])")
_AND = re.compile(r"\\(?:cap|land|wedge)(?![A-Za-z])|\\(?:text|mathrm)\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])|,|;")
_MEMBER = re.compile(r"\\in(?![A-Za-z])")
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:)\s*(.+)\\\}")
_WITHOUT = re.compile(r"-(?=\s*\\\{)|\\setminus(?![A-Za-z])|\\backslash(?![A-Za-z])")
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?")
_REALS = re.compile(
    r"\\mathbb\s*\{?R\}?|\\(?:text\{)?\s*all real numbers\}?|all reals?(?: numbers)?|\\text\{all reals?(?: numbers)?\}",
    re.IGNORECASE,
)
_SET_LIKE = re.compile(
    r"\\(?:le|ge|ne|cup|cap|setminus|in|emptyset|infty|mathbb)(?![A-Za-z])|[<>]|all real|no (?:real )?sol|empty set",
    re.IGNORECASE,
)
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "=": "="}


def is_set_like(text: str) -> bool:
    """Return whether ``text`` may be a set of numbers that is written otherwise elsewhere."""
    return _SET_LIKE.search(text) is not None


def real_set(text: str) -> tuple[str | None, Any] | None:
    """The variable, if one is named, and the SymPy set that ``text`` describes; None when it describes none."""
    try:
        return _read_set(text)
    # SymPy may fail in many ways to compare bounds.
    except Exception:
        return None


def relations_equal(prediction: str, reference: str) -> bool:
    """Return whether two equations or inequalities say the same: their differences of sides are in proportion."""
    sides = []
    for text in (prediction, reference):
        parts = split(text, _SIGN)
        signs = [match.group() for match in _SIGN.finditer(text)]
        if len(parts) != 2 or len(signs) != 1 or not all(parts):
            return False
        sign = signs[0]
        if sign in (">", "\\ge"):
            parts, sign = parts[::-1], _TURNED[sign]
        sides.append((sign, f"({parts[0]})-({parts[1]})"))
    (sign, difference), (reference_sign, reference_difference) = sides
    is_inequality = sign not in ("=", "\\ne")
    return sign == reference_sign and proportional(difference, reference_difference, is_inequality)


def _read_set(text: str) -> tuple[str | None, Any] | None:
    import sympy

    builder = _BUILDER.fullmatch(text)
    if builder is not None:
        found = _read_set(builder[2])
        return None if found is None or found[0] not in (None, builder[1].lower()) else (None, found[1])
    member = split(text, _MEMBER)
    if len(member) == 2 and _VARIABLE.fullmatch(member[0]) and len(split(member[1], _AND)) == 1:
        found = _read_set(member[1])
        return None if found is None or found[0] is not None else (member[0].lower(), found[1])
    for separator, combine in ((_OR, sympy.Union), (_WITHOUT, sympy.Complement), (_AND, sympy.Intersection)):
        pieces = split(text, separator)
        if 1 < len(pieces) <= MAX_PIECES:
            return _combined(pieces, combine, text)
    if _REALS.fullmatch(text):
        return None, sympy.S.Reals
    return _inequality(text) if _SIGN.search(text) else _bracketed(text)


def _combined(pieces: list[str], combine, text: str) -> tuple[str | None, Any] | None:
    import sympy

    found = [_read_set(piece) for piece in pieces]
    if None in found or (combine is sympy.Complement and len(found) != 2):
        return None
    names = {name for name, _ in found} - {None}
    # A comma between bounds of two directions may mean "and" or "or".
    if combine is sympy.Intersection and len(split(text, re.compile(","))) > 1 and "\\ne" not in text:
        return None
    return None if len(names) > 1 else (next(iter(names), None), combine(*(piece for _, piece in found)))


def _bracketed(text: str) -> tuple[None, Any] | None:
    import sympy

    form = read_form(text)
    bounds = [constant(part) for part in form.parts]
    if None in bounds:
        return None
    if form.kind == "set":
        return None, sympy.FiniteSet(*bounds)
    if form.kind != "tuple" or len(bounds) != 2 or not bounds[0] <= bounds[1]:
        return None
    return None, sympy.Interval(*bounds, form.brackets[0] == "(", form.brackets[1] == ")")


def _inequality(text: str) -> tuple[str, Any] | None:
    parts = split(text, _SIGN)
    signs = [match.group() for match in _SIGN.finditer(text)]
    if len(parts) != len(signs) + 1 or not 2 <= len(parts) <= 3 or "=" in signs:
        return None
    if len(parts) == 3:
        # Between two bounds, both signs point the same way.
        low, name, high = parts
        if "\\ne" in signs or (signs[0] in ("<", "\\le")) != (signs[1] in ("<", "\\le")):
            return None
        halves = [(_TURNED[signs[0]], low), (signs[1], high)]
    elif _VARIABLE.fullmatch(parts[0]):
        name, halves = parts[0], [(signs[0], parts[1])]
    else:
        name, halves = parts[1], [(_TURNED[signs[0]], parts[0])]
    bounds = [(sign, constant(bound)) for sign, bound in halves]
    if not _VARIABLE.fullmatch(name) or any(bound is None for _, bound in bounds):
        return None
    return name.lower(), _half_lines(bounds)


def _half_lines(bounds: list[tuple[str, Any]]):
    import sympy

    lines = {
        "<": lambda bound: sympy.Interval.open(-sympy.oo, bound),
        "\\le": lambda bound: sympy.Interval(-sympy.oo, bound),
        ">": lambda bound: sympy.Interval.open(bound, sympy.oo),
        "\\ge": lambda bound: sympy.Interval(bound, sympy.oo),
        "\\ne": lambda bound: sympy.Complement(sympy.S.Reals, sympy.FiniteSet(bound)),
    }
    return sympy.Intersection(*(lines[sign](bound) for sign, bound in bounds))
