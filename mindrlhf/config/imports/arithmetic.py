"""The arithmetic of a shell: ``$((2 * N + 1))``. Precedence and operators of C, on whole numbers of 64 bits."""

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*|\+\+|--|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>!~&|^?:])")
# From the loosest to the tightest; ** and what stands before a number come behind.
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_LIMIT, _MAX_DEPTH = 2**63, 50


class ArithmeticMistakeError(Exception):
    """The text is no arithmetic, or its value is not known or no number of 64 bits."""


def evaluate(text: str, lookup: Callable[[str], str]) -> int:
    """Return the value of an expression.

    Args:
        lookup: the value of a variable as text; empty where it has none.

    Raises:
        ArithmeticMistakeError: there is none.
    """
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ArithmeticMistakeError(text)
        tokens.append(match[1])
        at = match.end()
    reader = _Reader(tokens, lookup)
    value = reader.ternary()
    if reader.at != len(tokens):
        raise ArithmeticMistakeError(text)
    return value


class _Reader:
    def __init__(self, tokens: list[str], lookup: Callable[[str], str]):
        self.tokens, self.lookup = tokens, lookup
        self.at = self.depth = 0

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, *texts: str) -> str:
        found = self._peek()
        if found not in texts or not found:
            return ""
        self.at += 1
        return found

    def ternary(self) -> int:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ArithmeticMistakeError("too deep")
        value = self._level(0)
        if self._take("?"):
            yes = self.ternary()
            if not self._take(":"):
                raise ArithmeticMistakeError("no colon")
            no = self.ternary()
            value = yes if value else no
        self.depth -= 1
        return value

    def _level(self, number: int) -> int:
        if number == len(_LEVELS):
            return self._power()
        value = self._level(number + 1)
        while operator := self._take(*_LEVELS[number]):
            value = _apply(operator, value, self._level(number + 1))
        return value

    def _power(self) -> int:
        base = self._unary()
        return _apply("**", base, self._power()) if self._take("**") else base

    def _unary(self) -> int:
        signs = []
        while sign := self._take("-", "+", "!", "~"):
            signs.append(sign)
        value = self._atom()
        for sign in reversed(signs):
            value = {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]
        return value

    def _atom(self) -> int:
        if self._take("("):
            value = self.ternary()
            if not self._take(")"):
                raise ArithmeticMistakeError("no parenthesis")
            return value
        token = self._peek()
        self.at += 1
        if re.match(r"[A-Za-z_]", token):
            token = self.lookup(token).strip()
        if re.fullmatch(r"-?\d{1,18}", token):
            return int(token, 8 if re.fullmatch("0[0-7]+", token) else 10)
        if re.fullmatch(r"0[xX][\da-fA-F]{1,15}", token):
            return int(token, 16)
        raise ArithmeticMistakeError(f"{token!r} is no number")


def _apply(operator: str, left: int, right: int) -> int:
    if operator in ("/", "%") and right == 0 or operator in ("<<", ">>", "**") and not 0 <= right < 64:
        raise ArithmeticMistakeError(f"{left} {operator} {right}")
    quotient = abs(left) // abs(right or 1) * (1 if (left < 0) == (right < 0) else -1)
    results = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: quotient,
        "%": lambda: left - quotient * right,
        "**": lambda: left**right,
        "<<": lambda: left << right,
        ">>": lambda: left >> right,
        "&": lambda: left & right,
        "|": lambda: left | right,
        "^": lambda: left ^ right,
        "&&": lambda: bool(left and right),
        "||": lambda: bool(left or right),
        "==": lambda: left == right,
        "!=": lambda: left != right,
        "<": lambda: left < right,
        "<=": lambda: left <= right,
        ">": lambda: left > right,
        ">=": lambda: left >= right,
    }
    value = int(results[operator]())
    if not -_LIMIT <= value < _LIMIT:
        raise ArithmeticMistakeError(f"{left} {operator} {right} has more than 64 bits")
    return value
