"""Whether two written answers mean the same: cheaply for the common forms, through math-verify for LaTeX.

math-verify (github.com/huggingface/Math-Verify, Apache-2.0) parses LaTeX to SymPy and compares. Its time limits
rest on signals, which neither work in threads nor interrupt a long SymPy computation, so they are off here: the
reward pool's own limit is the guard. Only its LaTeX reader is used; its reader of plain expressions evaluates
Python.
"""

import functools
import logging
import re
from collections.abc import Callable

from mindrlhf.rewards.answers.choices import chosen, reference_choices, unwrapped
from mindrlhf.rewards.answers.numeric import strip_decoration
from mindrlhf.rewards.answers.units import parse_quantity, quantities_equal
from mindrlhf.sandbox import time_limit

# Beyond these math-verify's grammar takes from seconds to for ever (measured: 20 nested braces over 100 s).
MAX_EXPRESSION_CHARS = 500
MAX_NESTING = 10
# SymPy computes powers and factorials of integers out: 9^{9^{9}} would fill the memory.
_INTRACTABLE = re.compile(
    r"(?:\^|\*\*)\s*\{?\s*\(?\s*[0-9]+\s*(?:\^|\*\*)"  # a tower of powers
    r"|(?:\^|\*\*)\s*[{(]*\s*-?\s*[0-9.,]{4,}"  # a large exponent
    r"|[0-9]{4,}\s*\)?\s*!|!\s*\)?\s*!"  # a large factorial, or one of a factorial
    r"|(?:\^|\*\*)[^^]{0,20}!"
)
_INLINE_MATH = re.compile(r"(?<!\\)\$([^$]*)(?<!\\)\$")
_SPACING = re.compile(r"(?<!\\)\\(?:left|right|displaystyle|limits|[!,;: ])(?![a-z])|~")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ '-][^\W\d_]+)*")
_MIN_WORD_CHARS = 4
_BETWEEN = re.compile(
    r"(?P<low>[^<>=]+?)(?P<low_sign><|\\leq?|\\lt|≤)\s*[a-zA-Z]\s*(?P<high_sign><|\\leq?|\\lt|≤)(?P<high>[^<>=]+)"
)
_SIGN = r"<|>|\\leq?|\\geq?|\\lt|\\gt|≤|≥"
_BOUND = re.compile(
    rf"[a-zA-Z]\s*(?P<sign>{_SIGN})(?P<bound>[^<>=,]+)|(?P<left>[^<>=,]+?)(?P<turned>{_SIGN})\s*[a-zA-Z]"
)
_OPEN_SIGNS = ("<", ">", "\\lt", "\\gt")
_SPELLINGS = (("\\{", "{"), ("\\}", "}"), ("\\lbrace", "{"), ("\\rbrace", "}"))


def answers_equal(prediction: str, reference: str) -> bool:
    """Whether ``prediction`` means the same as ``reference``.

    By the first of these rules that applies:

    - the same text, but for spaces, decoration and case of words;
    - ``reference`` is a choice such as ``B`` or ``A, C``: the same letters are chosen;
    - both are numbers, with or without a unit (see ``numeric`` and ``units``): the same exact value;
    - one is a set in braces, the other a list in parentheses or brackets: different;
    - the same LaTeX value by math-verify: expressions, equations, intervals (also written as inequalities), sets,
      tuples, matrices.

    Expressions that are longer than ``MAX_EXPRESSION_CHARS``, nested deeper than ``MAX_NESTING`` or hold towers of
    powers or large exponents or factorials are equal only as texts.
    """
    prediction, reference = _clean(prediction), _clean(reference)
    if not prediction or not reference:
        return False
    if prediction == reference:
        return True
    letters = reference_choices(reference)
    if letters is not None and (picked := chosen(prediction)) is not None:
        return picked == letters
    quantity, reference_quantity = parse_quantity(prediction), parse_quantity(reference)
    if quantity is not None and reference_quantity is not None:
        return quantities_equal(quantity, reference_quantity)
    words, reference_words = _words(prediction), _words(reference)
    if words is not None and reference_words is not None:
        return words == reference_words
    if {_bracket(prediction), _bracket(reference)} == {"{", "("}:
        return False
    if not (_is_tractable(prediction) and _is_tractable(reference)):
        return False
    return _latex_comparison()(_as_interval(prediction), _as_interval(reference))


def _clean(text: str) -> str:
    """Drop decoration and what LaTeX needs for looks only. Long texts are compared as they are."""
    text = strip_decoration(text)
    if len(text) > MAX_EXPRESSION_CHARS:
        return text
    text = _INLINE_MATH.sub(r"\1", text)
    text = _SPACING.sub(lambda match: "" if match.group()[-1].isalpha() else " ", text)
    return re.sub(r"\s+", " ", text).strip()


def _words(text: str) -> str | None:
    """Text that is words, not algebra, in lower case: ``\\text{...}``, or long enough for no product of variables."""
    plain = unwrapped(text)
    if len(plain) > MAX_EXPRESSION_CHARS or not _WORDS.fullmatch(plain):
        return None
    return plain.casefold() if plain != text or len(plain) >= _MIN_WORD_CHARS else None


def _bracket(text: str) -> str:
    """``{`` for a set, ``(`` for a pair, a tuple or an interval, else nothing."""
    for written, plain in _SPELLINGS:
        text = text.replace(written, plain)
    if text.startswith("{") and text.endswith("}"):
        return "{"
    return "(" if text[0] in "([" and text[-1] in ")]" and "," in text else ""


def _as_interval(text: str) -> str:
    """Write ``1 < x \\le 2`` as ``(1, 2]`` and ``x \\ge 3`` as ``[3, \\infty)``, since math-verify equates them not."""
    match = _BETWEEN.fullmatch(text)
    if match is not None:
        left = "(" if match["low_sign"] in _OPEN_SIGNS else "["
        right = ")" if match["high_sign"] in _OPEN_SIGNS else "]"
        return f"{left}{match['low'].strip()}, {match['high'].strip()}{right}"
    match = _BOUND.fullmatch(text)
    if match is None:
        return text
    sign, bound = match["sign"] or match["turned"], (match["bound"] or match["left"]).strip()
    is_open = sign in _OPEN_SIGNS
    if (sign in (">", "\\ge", "\\geq", "\\gt", "≥")) == bool(match["sign"]):
        return f"{'(' if is_open else '['}{bound}, \\infty)"
    return f"(-\\infty, {bound}{')' if is_open else ']'}"


def _is_tractable(expression: str) -> bool:
    if len(expression) > MAX_EXPRESSION_CHARS or _INTRACTABLE.search(expression):
        return False
    depth = deepest = 0
    for character in expression:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest <= MAX_NESTING


@functools.cache
def _latex_comparison() -> Callable[[str, str], bool]:
    with time_limit.uncounted():
        from math_verify import LatexExtractionConfig, parse, verify

    # It warns that its time limits are off, and of every expression it cannot read.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    configuration = (LatexExtractionConfig(boxed_match_priority=0),)

    def read(expression: str) -> list:
        # In a box, so that the whole expression is read and nothing is searched for.
        boxed = f"\\boxed{{{expression}}}"
        return parse(boxed, extraction_config=configuration, fallback_mode="no_fallback", parsing_timeout=None)

    def equal(prediction: str, reference: str) -> bool:
        gold = read(reference)
        return bool(gold) and verify(gold, read(prediction), timeout_seconds=None)

    return equal
