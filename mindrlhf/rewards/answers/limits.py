"""Bounds on what is computed, checked by the size of an expression before anything is evaluated.

SymPy computes exactly: ``9^{9^9}`` would fill the memory, ``\\binom{10^9}{10^8}`` and most integrals would take all of
a sample's time. ``check_text`` judges the LaTeX, ``check_tree`` what is made of it without evaluation; both raise
``Refused`` with the reason by name.
"""

import re
from collections.abc import Iterator

# math-verify's grammar takes exponential time in nested brackets: 1 s at 8, 3 s at 10 bare braces on one core.
MAX_EXPRESSION_CHARS = 500
MAX_NESTING = 8
MAX_BARE_NESTING = 3
MAX_BARS = 6
# Binary digits of a number computed exactly.
MAX_BITS = 20_000
# Exponents up to 2^14, factorials and binomials of numbers below 2^10.
MAX_EXPONENT_BITS = 14
MAX_FACTORIAL_BITS = 10
MAX_NODES = 150

_COMMAND = re.compile(r"\\([A-Za-z]+)")
_KNOWN_COMMAND = re.compile(
    "frac|sqrt|binom|pi|times|cdot|div|ast|pm|mp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp"
    "|lfloor|rfloor|lceil|rceil|infty|text|textrm|textnormal|mathrm|mathbb|mathcal|mbox|rm|overline|bar|vec|hat|tilde"
    "|angle|triangle|circ|prime|begin|end|alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa"
    "|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega"
    "|cup|cap|setminus|in|le|ge|ne|lt|gt|approx|to|emptyset|mid|parallel|perp|cong|sim|equiv|vdots"
)
_LARGE_E_NOTATION = re.compile(r"[0-9]\s*[eE]\s*[-+]?\s*[0-9]{4,}")
_MATRIX = re.compile(r"\\(?:begin|end)\{([a-z]*)\}")
_OPENING = "{(["
_BARE_RUN = re.compile(r"[{(\[]+")


class Refused(ValueError):
    """An expression that is not evaluated; the text says why."""


def check_text(expression: str) -> None:
    """Raise before ``expression`` (LaTeX) is parsed.

    Raises:
        Refused: too long, nested too deeply, or with what is not computed at all.
    """
    check_text_size(expression)
    if expression.count("|") > MAX_BARS:
        raise Refused(f"more than {MAX_BARS} bars")
    if _LARGE_E_NOTATION.search(expression):
        raise Refused("a power of ten too large")
    for name in _COMMAND.findall(expression):
        if _KNOWN_COMMAND.fullmatch(name) is None:
            raise Refused(f"the command {name[:20]} is not computed")
    for name in _MATRIX.findall(expression):
        if not name.endswith("matrix"):
            raise Refused(f"the environment {name[:20]} is not computed")


def check_text_size(text: str) -> None:
    """Raise when ``text`` is too long to be taken apart, or its brackets are nested too deeply.

    Raises:
        Refused: that.
    """
    if len(text) > MAX_EXPRESSION_CHARS:
        raise Refused(f"longer than {MAX_EXPRESSION_CHARS} characters")
    depth = 0
    for character in text:
        depth += (character in _OPENING) - (character in "})]")
        if depth > MAX_NESTING:
            raise Refused(f"nested deeper than {MAX_NESTING}")
    for run in _BARE_RUN.findall(text.replace("\\", "").replace(" ", "")):
        if len(run) > MAX_BARE_NESTING:
            raise Refused(f"nested deeper than {MAX_BARE_NESTING} with nothing between")


def check_tree(tree) -> None:
    """Raise before ``tree``, an unevaluated SymPy expression or matrix, is evaluated.

    Raises:
        Refused: a power, factorial or binomial too large, too many parts, or a function that is not computed.
    """
    entries = list(_entries(tree))
    if sum(1 for entry in entries for _ in _walk(entry)) > MAX_NODES:
        raise Refused(f"more than {MAX_NODES} operations")
    for entry in entries:
        if num_bits(entry) > MAX_BITS:
            raise Refused("a number too large")


def _entries(tree) -> Iterator:
    """The entries of matrices, and the factors of those; or ``tree`` itself."""
    if getattr(tree, "is_MatMul", False) or getattr(tree, "is_MatAdd", False):
        for part in tree.args:
            yield from _entries(part)
    elif getattr(tree, "is_MatrixExpr", False) and not hasattr(tree, "tolist"):
        raise Refused(f"{type(tree).__name__[:30]} is not computed")
    elif getattr(tree, "is_Matrix", False):
        yield from tree
    else:
        yield tree


def _walk(tree) -> Iterator:
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.args)


def num_bits(node) -> float:
    """An upper bound on the binary digits of numerator and denominator that ``node`` has when it is computed."""
    if node.is_Rational:
        return max(1, int(node.p).bit_length(), int(node.q).bit_length())
    if node.is_Float:
        return max(64.0, abs(int(node._mpf_[2])) + node._mpf_[3])
    if not node.args:
        return 2.0  # a symbol or a constant
    name = type(node).__name__
    sizes = [num_bits(argument) for argument in node.args]
    if name == "Pow" or name == "exp":
        base, exponent = (2.0, sizes[0]) if name == "exp" else sizes
        exponent = _exponent_bits(node.args[-1], exponent)
        if exponent > MAX_EXPONENT_BITS or base * 2**exponent > MAX_BITS:
            raise Refused("a power too large")
        return base * 2**exponent
    if name in ("factorial", "binomial"):
        if sizes[0] > MAX_FACTORIAL_BITS or sizes[-1] > MAX_FACTORIAL_BITS:
            raise Refused(f"a {name} too large")
        return 2 ** sizes[0] * (sizes[0] if name == "factorial" else 1)
    if name in ("sinh", "cosh", "tanh") and sizes[0] > MAX_EXPONENT_BITS:
        raise Refused("a power too large")
    is_unknown = type(type(node)).__name__ == "UndefinedFunction"
    if not (node.is_Add or node.is_Mul or _FUNCTION.fullmatch(name) or is_unknown):
        raise Refused(f"{name[:30]} is not computed")
    size = sum(sizes) + 1
    if size > MAX_BITS:
        raise Refused("a number too large")
    return size


_FUNCTION = re.compile("a?(?:sin|cos|tan|cot|sec|csc)|a?(?:sin|cos|tan)h|log|Abs|floor|ceiling|UnevaluatedExpr")


def _exponent_bits(exponent, bits: float) -> float:
    """Of the size of an exponent, whatever the digits of its numbers: roots, and ``i\\pi/3``, are small."""
    if exponent.is_Mul:
        return max(1, sum(_exponent_bits(factor, num_bits(factor)) for factor in exponent.args))
    if exponent.is_number and exponent.is_imaginary and not exponent.args:
        return 0
    if exponent.is_Pow and exponent.base.is_Integer and exponent.exp.is_Integer and exponent.exp < 0:
        return 0
    if exponent.is_Rational:
        return max(1, (abs(int(exponent.p)) // int(exponent.q) + 1).bit_length())
    if exponent.is_Pow and exponent.base.is_Integer and exponent.exp.is_Rational and exponent.exp < 0:
        return 1
    return bits
