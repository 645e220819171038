"""Whether two written answers mean the same: cheaply for numbers, through math-verify for LaTeX.

math-verify (github.com/huggingface/Math-Verify, Apache-2.0) parses LaTeX to SymPy and compares. Its time limits
rest on signals, which neither work in threads nor interrupt a long SymPy computation, so they are off here: the
reward pool's own limit is the guard. Only its LaTeX reader is used; its reader of plain expressions evaluates
Python.
"""

import functools
import logging
from collections.abc import Callable

from mindrlhf.rewards import time_limit
from mindrlhf.rewards.numeric import numbers_equal, parse_number, strip_decoration

# Beyond these math-verify's grammar takes from seconds to for ever (measured: 20 nested braces over 100 s).
MAX_EXPRESSION_CHARS = 500
MAX_NESTING = 10


def answers_equal(prediction: str, reference: str) -> bool:
    """Whether ``prediction`` means the same as ``reference``.

    The same text, or the same number (see ``numeric``), or the same LaTeX value by math-verify, which is asked
    only when at least one of the two is not a plain number. Expressions that are longer than
    ``MAX_EXPRESSION_CHARS`` or nested deeper than ``MAX_NESTING`` are equal only as texts.
    """
    prediction, reference = strip_decoration(prediction), strip_decoration(reference)
    if not prediction or not reference:
        return False
    if prediction == reference:
        return True
    number, reference_number = parse_number(prediction), parse_number(reference)
    if number is not None and reference_number is not None:
        return numbers_equal(number, reference_number)
    if not (_is_tractable(prediction) and _is_tractable(reference)):
        return False
    return _latex_comparison()(prediction, reference)


def _is_tractable(expression: str) -> bool:
    if len(expression) > MAX_EXPRESSION_CHARS:
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
