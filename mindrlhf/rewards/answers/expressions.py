"""Comparison of two LaTeX expressions by value: parsed as a whole by math-verify's grammar, compared exactly.

math-verify (github.com/huggingface/Math-Verify, Apache-2.0) brings the grammar, ``latex2sympy2_extended``; it reads
LaTeX only and evaluates no Python. The tree is made without evaluation, so that its size is known before anything is
computed (``limits``). Decimals are exact, and no answer is rounded: values must agree to more digits than either text
could spell by luck, formulas at points of all signs. So ``1.414214`` is not ``\\sqrt{2}``, which it is for
math-verify's own comparison, and ``e^{-200}`` is not 0.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

from mindrlhf.rewards.answers.limits import Refused, check_text, check_tree, num_bits
from mindrlhf.rewards.answers.wording import is_algebra
from mindrlhf.sandbox import time_limit

# Digits to which equal values agree beyond those that the size of their expressions bounds.
NUM_GUARD_DIGITS = 20
# Of these many, which bounds the time: e^{-2000} is not 0.
MAX_DIGITS = 1200
# A formula is compared where the reference is real: at the first of these many places.
NUM_POINTS = 4

_MIXED = re.compile(r"(?<![0-9.}])([0-9]+)\s*(\\frac\{[0-9]+\}\{[0-9]+\}|(?<= )[0-9]+/[0-9]+(?![0-9]))")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_OVERLINE = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|dot|bar)\s*\{?([0-9]+)\}?")
# The grammar drops indices of numbers, and bases with them.
_INDEXED_NUMBER = re.compile(r"[0-9)]\s*_")
# 3(6), which the grammar takes for a mixed number.
_PRODUCT = re.compile(r"(?<=[0-9)])(?<![_^][0-9])\s*\((?=\s*-?[0-9]+(?:\.[0-9]+)?\s*\))")
# Roots of odd degree of negative numbers are meant to be real; SymPy's are complex.
_ODD_ROOT = re.compile(r"\\sqrt\s*\[([3579])\]\s*\{\s*-\s*([0-9]+)\s*\}")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_OTHER_BASE = re.compile(r"(?<![0-9A-Za-z.])0[xXbBo][0-9A-Fa-f]")
# Dates, times and codes.
_LEADING_ZERO = re.compile(r"(?<![0-9.])0[0-9]")
_FACTORIAL_TWICE = re.compile(r"!\s*!")
# Values of variables: of both signs, nothing special about them; alternating between variables.
_SAMPLES = ("7/5", "-23/17", "41/29", "-8/3", "13/31", "-47/43", "29/11", "-3/19", "53/37", "5/13")


def expressions_equal(prediction: str, reference: str, tolerance: float = 0.0) -> bool:
    """Return whether both are one expression, or matrix, with the same value.

    ``tolerance`` is the relative error that constants may have. Neither is evaluated when it is too large
    (``limits``); what cannot be read is equal to nothing.
    """
    is_real = not (_IMAGINARY.search(prediction) or _IMAGINARY.search(reference))
    try:
        trees = _parse(reference, is_real), _parse(prediction, is_real)
    except Refused:
        return False
    if trees[0] is None or trees[1] is None:
        return False
    compare = functools.partial(_values_equal, tolerance=tolerance)
    matrices = [_entries(tree) for tree in trees]
    if matrices != [None, None]:
        return None not in matrices and _matrices_equal(*matrices, compare)
    return compare(*trees)


@functools.lru_cache(maxsize=64)
def _parse(expression: str, is_real: bool):
    """The unevaluated tree of ``expression``; None when it is none, or words.

    Raises:
        Refused: it is too large to be computed.
    """
    expression = _MIXED.sub(r"(\1+\2)", _OVERLINE.sub(_repeating, expression))
    expression = _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", expression)
    expression = _PRODUCT.sub(r"\\cdot (", expression)
    check_text(expression)
    if not is_algebra(expression):
        return None
    if _LEADING_ZERO.search(expression) or _INDEXED_NUMBER.search(expression) or _OTHER_BASE.search(expression):
        return None
    if _FACTORIAL_TWICE.search(expression):
        raise Refused("a factorial of a factorial")
    tree = _reader()(expression, is_real)
    if tree is not None:
        check_tree(tree)
    return tree


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    bottom = "9" * len(period) + "0" * len(fixed)
    top = int(f"{whole or 0}{fixed}{period}") - int(f"{whole or 0}{fixed}")
    return f"\\frac{{{top}}}{{{bottom}}}"


def constant(expression: str):
    """The exact SymPy number that ``expression`` is, infinities included; None when it is no real number."""
    try:
        tree = _parse(expression, True)
        value = None if tree is None or getattr(tree, "is_Matrix", False) or tree.free_symbols else tree.doit()
    except Exception:
        return None
    return value if value is not None and value.is_extended_real else None


def proportional(prediction: str, reference: str, only_positive: bool) -> bool:
    """Return whether one formula is the other times a number other than 0, which ``only_positive`` asks to be positive.

    Of formulas that have one value everywhere, only those are that are so with functions as variables: an identity
    is proportional to its own rearrangements, and to no other identity.
    """
    try:
        trees = _parse(reference, True), _parse(prediction, True)
        return _proportional(*trees, only_positive) or _proportional(*map(_formal, trees), only_positive)
    # What SymPy raises for values that do not exist (1/0, log 0) is of many kinds.
    except Exception:
        return False


def _proportional(reference, prediction, only_positive: bool) -> bool:
    num_digits = _num_digits(reference, prediction)
    pairs = _values(reference, prediction, num_digits)
    if not all(value.is_finite for pair in pairs for value in pair):
        return False
    equal = functools.partial(_close, num_digits=num_digits, tolerance=0.0)
    base, other = next((pair for pair in pairs if not equal(pair[0], 0)), pairs[0])
    if equal(base, 0) or equal(other, 0) or (only_positive and not other / base > 0):
        return False
    is_constant = all(equal(value, base) for value, _ in pairs)
    return not is_constant and all(equal(pair[0], _value(pair[1] * base / other, num_digits)) for pair in pairs)


def _formal(tree):
    """``tree`` with each call of a function as a variable."""
    import sympy

    return tree.xreplace({call: sympy.Symbol(f"{call}()", real=True) for call in tree.atoms(sympy.Function)})


def _entries(tree):
    """The matrix that ``tree`` is, a sum or a multiple of matrices worked out; None for what is no matrix."""
    if not getattr(tree, "is_Matrix", False):
        return None
    if hasattr(tree, "tolist"):
        return tree
    try:
        return tree.doit().as_explicit()
    # Shapes that do not fit.
    except Exception:
        return None


def _matrices_equal(reference, prediction, compare: Callable[[Any, Any], bool]) -> bool:
    if reference.shape != prediction.shape:
        return False
    return all(compare(*entries) for entries in zip(reference, prediction, strict=True))


def _values_equal(reference, prediction, *, tolerance: float) -> bool:
    try:
        num_digits = _num_digits(reference, prediction)
        return all(_close(*pair, num_digits, tolerance) for pair in _values(reference, prediction, num_digits))
    # As in ``proportional``.
    except Exception:
        return False


def _num_digits(*trees) -> int:
    """Decimal places in which a number that the size of ``trees`` allows (see ``limits``) is told from 0."""
    # The values of variables have four times the bits that are counted for a variable.
    digits = math.ceil(4 * sum(map(num_bits, trees)) * math.log10(2))
    return min(digits, MAX_DIGITS) + NUM_GUARD_DIGITS


def _point(symbols: list, shift: int) -> dict:
    """Another sample for each variable, so that formulas which swap two of them differ."""
    import sympy

    samples = (sympy.Rational(_SAMPLES[(shift + 3 * i) % len(_SAMPLES)]) + i // len(_SAMPLES) for i in range(99))
    return dict(zip(symbols, samples))


def _values(reference, prediction, num_digits: int) -> list[tuple]:
    """Pairs of values: of constants, or at points where ``reference`` is real, if there are two or more."""
    symbols = sorted(reference.free_symbols | prediction.free_symbols, key=str)
    real, other = [], []
    for shift in range(len(_SAMPLES) if symbols else 1):
        point = _point(symbols, shift)
        value = _value(reference.xreplace(point), num_digits)
        (real if value.is_finite and value.is_real else other).append((value, point))
        if len(real) == NUM_POINTS:
            break
    points = real if len(real) > 1 else [*real, *other][:NUM_POINTS]
    return [(value, _value(prediction.xreplace(point), num_digits)) for value, point in points]


def _value(tree, num_digits: int):
    """The value of ``tree`` with an error far below ``num_digits`` decimal places, or infinity.

    Raises:
        ArithmeticError: the tree has no value.
    """
    import sympy

    value = tree.doit()
    if not value.is_Rational:
        value = sympy.N(value, 2 * num_digits)
    if value in (sympy.oo, -sympy.oo):
        return value
    if not value.is_number or value.has(sympy.nan, sympy.zoo):
        raise ArithmeticError("no value")
    return value


def _close(reference, prediction, num_digits: int, tolerance: float) -> bool:
    import sympy

    reference, prediction = sympy.sympify(reference), sympy.sympify(prediction)
    if not (reference.is_finite and prediction.is_finite):
        return bool(reference == prediction)
    if reference.is_Rational and prediction.is_Rational and not tolerance:
        return bool(reference == prediction)
    allowed = sympy.Rational(1, 10**num_digits) + tolerance * abs(reference)
    return bool(abs(reference - prediction) <= allowed)


@functools.cache
def _reader() -> Callable[[str, bool], Any]:
    with time_limit.uncounted():
        import sympy
        from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
        from latex2sympy2_extended.sets import FiniteSet

    # It would read 3(6) as the mixed number 3 + 6.
    configuration = ConversionConfig(interpret_as_mixed_fractions=False)
    imaginary = {sympy.Symbol("i"): sympy.I}

    def exact(tree):
        """Decimals as the fractions they are, functions without meaning as variables."""
        floats = {number: sympy.Rational(str(number)) for number in tree.atoms(sympy.Float)}
        unknown = {
            call: sympy.Symbol(str(call), real=True)
            for call in tree.atoms(sympy.Function)
            if isinstance(type(call), sympy.core.function.UndefinedFunction)
        }
        return tree.xreplace(floats | unknown | imaginary)

    def read(expression: str, is_real: bool):
        try:
            # The flag is local to the thread.
            with sympy.evaluate(False):
                tree = latex2sympy(
                    expression,
                    is_real=is_real or None,
                    convert_degrees=_ANGLE.search(expression) is not None,
                    normalization_config=None,
                    conversion_config=configuration,
                )
                if isinstance(tree, sympy.MatrixBase):
                    return tree.applyfunc(exact)
                # A brace around an expression makes a set of one.
                while isinstance(tree, FiniteSet) and len(tree.args) == 1:
                    tree = tree.args[0]
                return exact(tree) if isinstance(tree, sympy.Expr) else None
        # The grammar's errors are bare exceptions.
        except Exception:
            return None

    return read
