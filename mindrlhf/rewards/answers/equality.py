"""Comparison of two written answers by meaning: cheap for the common forms, exact for all.

Lists, sets, tuples, intervals and equations are taken apart here (``forms``, ``relations``); the values in them are
numbers, quantities, words or LaTeX expressions, which ``expressions`` compares through math-verify's grammar.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from mindrlhf.rewards.answers.choices import chosen, option_text, reference_choices, unwrapped
from mindrlhf.rewards.answers.expressions import expressions_equal
from mindrlhf.rewards.answers.forms import (
    MAX_PARTS,
    Equation,
    Form,
    is_constant,
    is_name,
    read_equation,
    read_form,
    split,
)
from mindrlhf.rewards.answers.limits import MAX_EXPRESSION_CHARS, Refused, check_text_size
from mindrlhf.rewards.answers.numeric import is_float32_of, is_near, numbers_equal, parse_number
from mindrlhf.rewards.answers.relations import is_set_like, real_set, relations_equal
from mindrlhf.rewards.answers.spelling import plain_spelling
from mindrlhf.rewards.answers.units import parse_quantity, split_unit, units_fit, words_fit
from mindrlhf.rewards.answers.wording import counts, is_algebra, ordered_form, standard_form, times_equal, words_of

_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ '-][^\W\d_]+)*")
_MIN_WORD_CHARS = 4
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_EQUALS_OR_IN = re.compile(r"==?|\\in(?![A-Za-z])")
_POINT = re.compile(r"^[A-Z]\s*(?=\([^()]*,[^()]*\)$)")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*")
_COMMA = re.compile(r",\s*")
# p=5,q=2;p=7,q=2
_SOLUTIONS = re.compile(r"[A-Za-z]\s*=([^,;=]+),\s*[A-Za-z]\s*=([^,;=]+)")
_SYSTEM = re.compile(rf"{_SOLUTIONS.pattern}(?:\s*;\s*{_SOLUTIONS.pattern})+")
_RANGE = re.compile(r"(-?[0-9]{1,4}), ?(-?[0-9]{1,4}), ?(?:\\[lc]?dots|\.\.\.) ?, ?(-?[0-9]{1,4})")
_EQUALS = re.compile("==?")
_LISTED_IN_TEXT = re.compile(r"^\\text\s*\{([^{}]*(?:,| and | or )[^{}]*)\}$")
_ARTICLE = re.compile(r"^(?:an?|the) ")
_AND = re.compile(r"\band\b")
_CURRENCY_CODE = re.compile(r"(?:USD|EUR|GBP|INR|Rs\.?|US|₹)\s*(?=[$0-9])")
# A variable stands before a bracket without a space: 3x(x-2).
_TIMES = re.compile(r"(?<=[0-9)%])(?<!(?<![0-9.])0)(?:\s*[xX]\s*(?=[0-9])|\s+[xX]\s+(?=\())")
_MAX_DEPTH = 4


def answers_equal(prediction: str, reference: str, tolerance: float = 0.0) -> bool:
    """Return whether ``prediction`` means the same as ``reference``.

    The rules, of which the first that applies decides, are those of docs/verifiers.md: the same text, numbers, choices,
    quantities, what is ordered, words, sets of numbers, equations, lists, values of expressions.

    ``tolerance`` is the relative error that numbers may have; 0 means that decimals of surds are wrong.
    What is too large to be computed (``limits``) is equal only as text. No pair raises.
    """
    try:
        return _answers_equal(prediction, reference, tolerance)
    # Whatever fails here must not be worth more than a wrong answer: a verifier that raises gives the sample another
    # value than 0.
    except Exception:
        return False


def _answers_equal(prediction: str, reference: str, tolerance: float) -> bool:
    if prediction != reference:
        prediction, reference = plain_spelling(prediction), plain_spelling(reference)
    if not prediction.strip() or not reference:
        return False
    if prediction == reference:
        return True
    numbers = parse_number(prediction), parse_number(reference)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers_equal(*numbers) or is_near(*numbers, tolerance) or is_float32_of(numbers[1], numbers[0])
    letters = reference_choices(reference)
    if letters is not None:
        picked, option = chosen(prediction), option_text(reference)
        if picked is not None:
            return picked == letters
        if option:
            return _answers_equal(prediction, option, tolerance)
    return _Comparison(tolerance).equal(prediction, reference)


class _Comparison:
    """The rules behind ``answers_equal``, for texts in plain spelling."""

    def __init__(self, tolerance: float):
        self._tolerance = tolerance

    def equal(self, prediction: str, reference: str, depth: int = 0) -> bool:
        prediction, reference = (_LISTED_IN_TEXT.sub(r"\1", text) for text in (prediction, reference))
        prediction, reference = (standard_form(_CURRENCY_CODE.sub("", text)) for text in (prediction, reference))
        if _squeezed(prediction) == _squeezed(reference):
            return True
        quantities = parse_quantity(prediction), parse_quantity(reference)
        if quantities[0] is not None and quantities[1] is not None:
            (number, unit, behind), (other, other_unit, other_behind) = quantities
            is_equal = numbers_equal(number, other) or is_near(number, other, self._tolerance)
            return is_equal and units_fit(unit, other_unit) and words_fit(behind, other_behind)
        if (verdict := _in_order(prediction, reference)) is not None:
            return verdict
        words, reference_words = _words(prediction), _words(reference)
        if words is not None and reference_words is not None:
            # "odd and even" is "even and odd": lists are compared below.
            is_list = _AND.search(words) and _AND.search(reference_words)
            if words == reference_words or not is_list:
                return words == reference_words
        if depth > _MAX_DEPTH or not (_can_be_read(prediction) and _can_be_read(reference)):
            return False
        if is_set_like(prediction) or is_set_like(reference):
            verdict = _sets_equal(prediction, reference)
            if verdict is not None:
                return verdict
        forms = _form(prediction), _form(reference)
        if forms[0].kind == forms[1].kind == "value":
            return self._equations_equal(forms[0].parts[0], forms[1].parts[0], depth)
        return self._forms_equal(*forms, depth)

    def _equations_equal(self, prediction: str, reference: str, depth: int) -> bool:
        read = read_equation(prediction, self._agree)
        reference_read = read_equation(reference, self._agree)
        # An equation of several variables; or a formula, with its name or without.
        is_formula = reference_read is None or _INEQUALITY.search(reference)
        if not is_formula and reference_read.name:
            is_formula = "+" in reference_read.name or not is_constant(reference_read.values[-1])
        if is_formula and relations_equal(prediction, reference):
            return True
        if read is None or reference_read is None:
            return False
        if not _names_fit(read, reference_read):
            return False
        if reference_read.is_relation and _squeezed(read.name or "") != _squeezed(reference_read.name):
            return False
        is_apart = len(split(prediction, _EQUALS)) + len(split(reference, _EQUALS)) > 2
        return any(
            self._values_equal(value, reference_value, is_apart, depth)
            for value in read.values
            for reference_value in reference_read.values
        )

    def _values_equal(self, prediction: str, reference: str, is_apart: bool, depth: int) -> bool:
        """Values without form; those that come out of an equation are looked at anew."""
        if is_apart:
            return self.equal(prediction, reference, depth + 1)
        (prediction, unit), (reference, reference_unit) = split_unit(prediction), split_unit(reference)
        if unit and reference_unit and unit != reference_unit:
            return False
        numbers = parse_number(prediction), parse_number(reference)
        if numbers[0] is not None and numbers[1] is not None:
            return numbers_equal(*numbers) or is_near(*numbers, self._tolerance)
        shares = [text.endswith("%") for text in (prediction, reference)]
        prediction, reference = prediction.removesuffix("%"), reference.removesuffix("%")
        if shares[0] != shares[1]:  # 42% is 0.42 and 42
            whole, part = (prediction, reference) if shares[0] else (reference, prediction)
            if expressions_equal(f"\\frac{{{whole}}}{{100}}", part, self._tolerance):
                return True
        prediction, reference = (_TIMES.sub(r"\\times ", text) for text in (prediction, reference))
        if not (is_algebra(prediction) and is_algebra(reference)):
            return words_of(prediction) == words_of(reference)
        return expressions_equal(prediction, reference, self._tolerance)

    def _forms_equal(self, form: Form, reference: Form, depth: int) -> bool:
        kinds = {form.kind, reference.kind}
        if {form.kind, reference.kind} == {"set", "tuple"} and 1 in (len(form.parts), len(reference.parts)):
            pair, whole = (form.parts[0], reference.parts) if form.kind == "set" else (reference.parts[0], form.parts)
            pair = read_form(pair)
            return pair.kind == "tuple" and self._matched(pair.parts, whole, depth, is_ordered=True)
        if kinds == {"set", "tuple"} or max(len(form.parts), len(reference.parts)) > MAX_PARTS:
            return False
        if "value" in kinds and not (kinds == {"value", "set"} and len(form.parts) == len(reference.parts) == 1):
            return self._named_form_equals(form, reference, depth)
        if form.kind == reference.kind == "tuple" and len(form.parts) == 2 and form.brackets != reference.brackets:
            return False
        if kinds == {"tuple", "list"} and (form.brackets or reference.brackets) in ("[)", "(]"):
            return False
        if any(re.fullmatch("-?0[0-9]+", part) for part in (*form.parts, *reference.parts)):
            return False  # (3,004) is not (3,4)
        if {form.kind, reference.kind} == {"value", "set"} and "\\emptyset" in form.parts + reference.parts:
            return False
        return self._matched(
            form.parts, reference.parts, depth, is_ordered="tuple" in kinds, is_set="set" in kinds and len(kinds) == 1
        )

    def _named_form_equals(self, form: Form, reference: Form, depth: int) -> bool:
        """``(x, y) = (1, 2)`` beside ``(1, 2)``, ``x = 1, 2`` beside ``1, 2``."""
        single, is_prediction = (form, True) if form.kind == "value" else (reference, False)
        other = reference if is_prediction else form
        parts = split(single.parts[0], _EQUALS_OR_IN)
        if len(parts) != 2 or not is_name(parts[0]) or not parts[1]:
            return False
        value = read_form(parts[1])
        if value.kind == "value" and other.kind != "set":
            return False
        return self._forms_equal(*((value, other) if is_prediction else (other, value)), depth)

    def _matched(
        self, parts: Sequence[str], references: Sequence[str], depth: int, is_ordered: bool, is_set: bool = False
    ) -> bool:
        def equal(part: str, reference: str) -> bool:
            return self.equal(part, reference, depth + 1)

        if is_set:  # where repetition does not count
            return all(any(equal(part, other) for other in references) for part in parts) and all(
                any(equal(part, other) for part in parts) for other in references
            )
        if len(parts) != len(references):
            return False
        if is_ordered:
            return all(map(equal, parts, references))
        return _matched_one_to_one(parts, list(references), equal)

    def _agree(self, value: str, last: str) -> bool:
        """Return whether two constants of one chain are equal, up to the rounding of the second."""
        number = parse_number(last)
        value = _for_computing(value)
        if expressions_equal(value, _for_computing(last)):
            return True
        places = len(last.partition(".")[2].rstrip("%")) if number is not None and "." in last else 0
        if number is None or number.value == 0 or not places:
            return False
        tolerance = Fraction(51, 100) / 10**places / abs(number.value)
        return expressions_equal(value, _for_computing(last), float(tolerance))


def _matched_one_to_one(parts: Sequence[str], references: list[str], equal: Callable[[str, str], bool]) -> bool:
    for part in parts:
        place = next((i for i, reference in enumerate(references) if equal(part, reference)), None)
        if place is None:
            return False
        del references[place]
    return True


def _in_order(prediction: str, reference: str) -> bool | None:
    """Return whether two dates, times, remainders, measures or counts of things are the same; None of others."""
    verdict = times_equal(prediction, reference)
    if verdict is not None:
        return verdict
    forms = ordered_form(prediction), ordered_form(reference)
    if forms != (None, None):
        return forms[0] == forms[1]
    amounts = counts(prediction), counts(reference)
    if None in amounts:
        return None
    if amounts[0].keys() == amounts[1].keys():
        return amounts[0] == amounts[1]
    return [*amounts[0].values()] == [*amounts[1].values()]


def _sets_equal(prediction: str, reference: str) -> bool | None:
    """Return whether both are the same set of real numbers; None when one of them is none."""
    found, wanted = real_set(prediction), real_set(reference)
    if found is None or wanted is None:
        return None
    (name, numbers), (reference_name, reference_numbers) = found, wanted
    if name is not None and reference_name is not None and name != reference_name:
        return False
    return bool(numbers == reference_numbers or numbers.symmetric_difference(reference_numbers).is_empty)


def _names_fit(equation: Equation, reference: Equation) -> bool:
    """Two variables must be the same; words name anything."""
    names = [re.sub(r"[\s{}\\]", "", name).casefold() for name in (equation.name, reference.name) if name]
    is_symbol = [len(name) == 1 or "_" in name for name in names]
    return len(names) < 2 or names[0] == names[1] or not all(is_symbol)


def _can_be_read(text: str) -> bool:
    try:
        check_text_size(text)
    except Refused:
        return False
    return True


def _listed(text: str) -> str:
    """``1, 2, \\ldots, 5`` with all its numbers."""
    match = _RANGE.search(text)
    if match is None or int(match[2]) - int(match[1]) not in (1, -1):
        return text
    first, step, last = int(match[1]), int(match[2]) - int(match[1]), int(match[3])
    numbers = range(first, last + step, step)
    return text if len(numbers) > MAX_PARTS else _RANGE.sub(", ".join(map(str, numbers)), text)


def _both_signs(text: str) -> str:
    """``x = 3 \\pm y`` as a list of two."""
    if len(_PLUS_MINUS.findall(text)) != 1 or "\\mp" in text:
        return text
    name, equals, value = text.rpartition("=")
    if read_form(value).kind != "value":
        return text
    both = (_PLUS_MINUS.sub(sign, value).strip().removeprefix("+") for sign in ("+", "-"))
    return ", ".join(f"{name}{equals}{one}" for one in both)


def _form(text: str) -> Form:
    text = _POINT.sub("", text)
    form = read_form(_both_signs(_SOLUTIONS.sub(r"(\1,\2)", text) if _SYSTEM.fullmatch(text) else _listed(text)))
    if form.kind not in ("set", "list") or "\\pm" not in text:
        return form
    return form._replace(parts=tuple(part for one in form.parts for part in split(_both_signs(one), _COMMA)))


def _for_computing(value: str) -> str:
    value = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|[$€£]|(?<=[0-9]),(?=[0-9]{3})", "", value)
    value = re.sub("(?<=[0-9])°", r"^\\circ ", value)
    return _TIMES.sub(r"\\times ", re.sub(r"([0-9.]+)\s*%", r"\\frac{\1}{100}", value))


def _squeezed(text: str) -> str:
    """Without spaces that separate nothing, and without braces around a single index."""
    text = re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)
    return re.sub(r"_\{([0-9A-Za-z]+)\}", r"_\1", text)


def _words(text: str) -> str | None:
    """Text that is words, not algebra, in lower case: ``\\text{...}``, or long enough for no product of variables."""
    plain = unwrapped(text)
    if len(plain) > MAX_EXPRESSION_CHARS or not _WORDS.fullmatch(plain):
        return None
    is_word = plain != text or len(plain) >= _MIN_WORD_CHARS
    return _ARTICLE.sub("", plain.casefold()) if is_word else None
