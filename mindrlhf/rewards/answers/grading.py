"""Right or wrong: the final answer of a response against the reference answer of a record."""

import ast
import contextlib
import functools
import re

from mindrlhf.rewards.answers.choices import reference_choices, stated_choice, states_choice
from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.answers.extraction import answer_marks, final_answer, has_box, is_marked, last_boxed, own_words
from mindrlhf.rewards.answers.marks import extend, has_decimal_comma, plain_width
from mindrlhf.rewards.answers.prose import stated_answer
from mindrlhf.rewards.answers.restated import is_result, restates
from mindrlhf.rewards.answers.spelling import without_end_tokens

_MAX_TAIL_CHARS = 2000
# Before three digits it may separate thousands.
_DECIMAL_COMMA = re.compile(r"(?<=[0-9]),(?=(?:[0-9]{1,2}|[0-9]{4,})(?![0-9,]))(?<![0-9,]{9})")
# ["7"], ['7']: OlympiadBench and others keep a list of answers.
_LIST = re.compile(r"\[\s*([\"']).*\1\s*\]", re.DOTALL)


def is_correct(
    prediction: str | None, answer: str, tolerance: float = 0.0, prompt: str = "", *, is_marked: bool = True
) -> bool:
    """Return whether ``prediction`` (None: none) means the same as ``answer``, or is a sentence that states it.

    It must be a result too, not the question again (``restated.is_result``, with ``prompt`` and ``is_marked``).
    ``tolerance`` is the relative error that numbers may have.

    Raises:
        ValueError: the reference answer is empty.
    """
    reference = reference_answer(answer)
    if prediction is None:
        return False
    is_choice = reference_choices(reference) is not None
    if answers_equal(prediction, reference, tolerance):
        return is_choice or is_result(prediction, reference, prompt, is_marked=is_marked)
    if " " not in prediction.strip():
        return False
    if is_choice:
        return {stated_choice(without_end_tokens(prediction))} == reference_choices(reference)
    stated = stated_answer(prediction)
    if stated is None or restates(prediction) or not answers_equal(stated, reference, tolerance):
        return False
    return is_result(stated, reference, prompt, is_marked=is_marked)


def answers_right(completion: str, answer: str, prompt: str, finish_reason: str, tolerance: float, marks: str) -> bool:
    """Return whether a response ends with the right answer, marked or not.

    A response without a mark that was cut (``finish_reason`` "length") has none. ``marks``: see ``marks.extend``.

    Raises:
        ValueError: the reference answer is empty.
    """
    if marks:
        extend(marks)
    text = without_end_tokens(plain_width(own_words(completion, prompt))).replace("\u00f7", "\\div ")
    if reference_choices(reference_answer(answer)) is not None and not is_marked(text):
        is_whole = finish_reason != "length" or states_choice(text)
        return is_whole and is_correct(stated_choice(text), answer, tolerance, prompt)
    found = answer_marks(text)
    if not found and (finish_reason == "length" or restates(text, prompt)):
        return False
    prediction = final_answer(text, found)
    if is_correct(prediction, answer, tolerance, prompt, is_marked=bool(found)):
        return True
    if prediction is None or "," not in prediction or not has_decimal_comma(text[-_MAX_TAIL_CHARS:]):
        return False
    return is_correct(_DECIMAL_COMMA.sub(".", prediction), answer, tolerance, prompt, is_marked=bool(found))


@functools.lru_cache(64)
def reference_answer(answer: str) -> str:
    """The reference without the solution that leads to it: what stands behind ``#### ``, or in its last box.

    A list of texts, as JSON or Python writes it, is its parts.

    Raises:
        ValueError: it is empty.
    """
    _, hashes, reference = answer.rpartition("#### ")
    reference = reference.strip()
    if not hashes and has_box(reference):
        reference = (last_boxed(reference) or reference).strip()
    if _LIST.fullmatch(reference):
        # A list that no program has written, such as ["a" and "b"], stays.
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            reference = ", ".join(ast.literal_eval(reference))
    if not reference:
        raise ValueError("the reference answer is empty")
    return reference
