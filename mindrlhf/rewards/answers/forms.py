"""The outer form of an answer: one value, a list, a set, a tuple or interval; and names before equals signs.

Texts here are in the spelling of ``spelling.plain_spelling``.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

# More parts are compared as text only: matching is quadratic in them.
MAX_PARTS = 12

_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_OPENING, _CLOSING = ("{", "(", "[", "\\{"), ("}", ")", "]", "\\}")
_PAIRS = (("\\{", ("\\}",)), ("{", ("}",)), ("(", (")", "]")), ("[", (")", "]")))
_SEPARATOR = re.compile(
    r"\s*(?:(?:[,;]\s*)?(?:\\(?:text|mathrm|mbox)\{\s*(?:and|or|,)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\(?:lor|land|vee|wedge)(?![A-Za-z]))|[,;])\s*"
)
_EQUALS = re.compile(r"==?")
_DECIMAL = re.compile(r"[-+]?\s*[0-9,]*\.?[0-9]*\s*\\?%?")
_EQUALS_OR_SO = re.compile(r"==?|\\(?:approx|sim)(?![A-Za-z])")
_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,]*[0-9])")
_WIDE_SEPARATOR = re.compile(r",\s|;|\b(?:and|or)\b")
_FRENCH = re.compile(r"([\[\]])([^\[\]]*[,;][^\[\]]*)([\[\]])")

_WORDS_AROUND = re.compile(r"\\(?:text|textrm|mathrm|mbox|rm)\s*\{[^{}]*\}")
_OF_A_RANGE = re.compile(r"\\(?:int|iint|oint|lim|sum|prod)(?![A-Za-z])")
_INDEX = re.compile(r"_\s*(?:\{[^{}]*\}|[A-Za-z0-9])|'")
_ARGUMENTS = re.compile(r"(?<=[A-Za-z])(?:\^\{-1\})?\([^()]*\)")
_NAMED_BY = re.compile(
    r"\\(?:angle|triangle|overline|vec|hat|bar|frac|cdot|widehat|mathbf|alpha|beta|gamma|delta|theta|lambda|mu|omega|phi|rho"
    r"|sigma|tau|Delta|Omega|Phi|epsilon|varepsilon|eta|xi|psi|chi|kappa|nu|zeta|ell|partial|det|gcd|max|min|dim|deg|Pr)(?![A-Za-z])"
)
_BARE = re.compile(r"[A-Za-z][A-Za-z\s+\-/{}]*|\[[A-Z]+\]|\(\s*[A-Za-z]\s*(?:,\s*[A-Za-z]\s*)+\)|[A-Za-z][A-Za-z ']*")
_COMPOUND = re.compile(r"[A-Za-z]{1,3}(?:[-+/*][A-Za-z]{1,3})+|(?!am|pm|my|no|up)[a-z]{2}|abc|xyz|pqr|[a-z](?: [a-z])+")
_LENGTH = re.compile(r"\|\s*(?:z|[A-Z]+|\{?[a-z]\}?)\s*\|")


class Form(NamedTuple):
    """``kind`` is value, list, set or tuple; ``brackets`` are those of a tuple, such as ``[)``."""

    kind: str
    parts: tuple[str, ...]
    brackets: str = ""


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """``text`` cut at what matches ``separator`` outside all brackets; a single part when brackets do not match."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        if depth == 0 and (match := separator.match(text, place)) is not None:
            parts.append(text[start : match.start()].strip())
            start = place = match.end()
            continue
        command = _COMMAND.match(text, place)
        token = command.group() if command is not None else text[place]
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth < 0:
            return [text]
        place += len(token)
    return [text] if depth else [*parts, text[start:].strip()]


def read_form(text: str) -> Form:
    """The form of ``text``; brackets around a single value are dropped."""
    match = _FRENCH.fullmatch(text)
    if match is not None and (match[1] == "]" or match[3] == "["):
        text = f"{'(' if match[1] == ']' else '['}{match[2]}{')' if match[3] == '[' else ']'}"
    bracket, inner = _enclosed(text)
    if bracket:
        parts = _parts(inner, is_enclosed=True)
        if bracket[0] in "\\{" and (bracket[0] == "\\" or len(parts) > 1):
            return Form("set", parts)
        if len(parts) > 1:
            return Form("tuple", parts, bracket)
        return read_form(inner) if bracket in ("()", "{}") and inner else Form("value", (text,))
    parts = _parts(text)
    return Form("list" if len(parts) > 1 else "value", parts)


def is_name(text: str) -> bool:
    """Return whether ``text`` names the quantity of an equation: ``x``, ``f(2)``, ``m+n``, ``|AB|``, words.

    ``2x``, ``x^2``, ``\\sqrt{x}`` and ``-x`` are no names: their value is not that of x.
    """
    text = text.strip()
    if _OF_A_RANGE.match(text):
        return True
    if ":" in text:  # the terms of a ratio
        return all(map(is_name, text.split(":")))
    bare = _NAMED_BY.sub("a", _WORDS_AROUND.sub("W", text))
    for _ in range(2):
        bare = _ARGUMENTS.sub("", _INDEX.sub("", bare))
    if _LENGTH.fullmatch(bare):
        return bare.strip("| {}") not in ("x", "y")
    return _BARE.fullmatch(bare.strip()) is not None


class Equation(NamedTuple):
    """An equation: the name on its left, if any, and the values given, exact ones before approximate ones."""

    name: str | None
    values: tuple[str, ...]

    @property
    def is_relation(self) -> bool:
        """True for a sum, product or quotient of variables: its value alone says nothing of them."""
        return self.name is not None and _COMPOUND.fullmatch(_INDEX.sub("", self.name).strip()) is not None


def read_equation(text: str, agree: Callable[[str, str], bool]) -> Equation | None:
    """``text`` as values, with or without a name before; None for equations that do not give a value, or contradict.

    ``agree`` says whether two constants are equal, up to the rounding of the second when it is a decimal: ``42 = 43``
    gives no value, ``6 \\cdot 7 = 42`` gives 42.
    """
    parts = split(text, _EQUALS_OR_SO)
    if len(parts) == 1:
        return Equation(None, (text,))
    if parts[0] == "":
        parts = parts[1:]
    if not is_name(parts[0]) and len(parts) == 2 and is_name(parts[1]):
        parts = parts[::-1]
        text = parts[-1]
    name = parts[0] if is_name(parts[0]) else None
    values = parts[1:] if name is not None else parts
    if not values or not all(values):
        return None
    # 5 = 5 and x = x say nothing.
    if len(parts) > 1 and len({_bare_decimal("".join(part.split())) for part in parts}) == 1:
        return None
    constants = [value for value in values if is_constant(value)]
    if name is None and len(constants) < len(values):
        return None
    if len(constants) > 1 and not all(agree(value, constants[-1]) for value in constants[:-1]):
        return None
    # x/x = 1 is true of every x.
    if name is not None and Equation(name, ()).is_relation and agree(name, values[-1]):
        return None
    exact = split(text, _EQUALS)[-1]
    last_exact = split(exact, _EQUALS_OR_SO)[0]
    # Of two decimals the last is the answer: the other may be any of a chain of roundings.
    given = values[-1:] if _DECIMAL.fullmatch(last_exact) else (last_exact, values[-1])
    return Equation(name, tuple(dict.fromkeys(value for value in given if value)))


def _bare_decimal(text: str) -> str:
    return text.rstrip("0").rstrip(".") if re.fullmatch(r"[-+]?[0-9]*\.[0-9]*", text) else text


def is_constant(text: str) -> bool:
    """Return whether ``text`` has no variables, as far as its letters show."""
    text = re.sub(r"(?<![A-Za-z\\])(?:e(?=\s*\^)|i(?=\s*\\pi))", "", _WORDS_AROUND.sub("", text))
    text = re.sub(r"\\(?:frac|sqrt|pi|times|cdot|div|binom|circ|ast|log|ln|exp|sin|cos|tan)(?![A-Za-z])", "", text)
    return re.search(r"[A-Za-wyzA-WYZ\\]|(?<![0-9] )[xX]|[xX](?! ?[0-9(])", text) is None


def _parts(text: str, is_enclosed: bool = False) -> tuple[str, ...]:
    # 1,000, 2,000: with wider separators there, a comma inside a number separates thousands.
    if _WIDE_SEPARATOR.search(text):
        text = _GROUPS.sub(lambda match: match.group().replace(",", ""), text)
    elif not is_enclosed and re.fullmatch(_GROUPS.pattern, text.lstrip("+-$ ")):
        return (text,)
    return tuple(split(text, _SEPARATOR))


def _enclosed(text: str) -> tuple[str, str]:
    """The pair of brackets around the whole of ``text``, and what is inside; or two empty texts."""
    for opening, closings in _PAIRS:
        for closing in closings if text.startswith(opening) else ():
            is_end = text.endswith(closing) and (closing == "\\}" or text[-2:-1] != "\\")
            inner = text[len(opening) : len(text) - len(closing)]
            if is_end and _is_balanced(inner):
                return opening + closing, inner.strip()
    return "", ""


def _is_balanced(text: str) -> bool:
    depth = 0
    for token in _COMMAND.sub(lambda match: match.group() if match.group() in ("\\{", "\\}") else " ", text):
        depth += (token in "{([") - (token in "})]")
        if depth < 0:
            return False
    return depth == 0
