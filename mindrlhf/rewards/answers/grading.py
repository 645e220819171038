"""Right or wrong: the final answer of a response against the reference answer of a record."""

import ast
import re

from mindrlhf.rewards.answers.choices import reference_choices, stated_choice, states_choice
from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.answers.extraction import behind_thoughts, final_answer, has_box, is_marked, last_boxed, own_words
from mindrlhf.rewards.answers.prose import stated_answer, states_value
from mindrlhf.rewards.answers.restated import is_result, restates
from mindrlhf.rewards.answers.spelling import without_end_tokens

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
        return stated_choice(without_end_tokens(prediction)) == reference
    stated = stated_answer(prediction)
    # "\ln e = 1" states 1, but not that x+y is 1.
    is_nameless = "=" in reference and "=" in prediction and stated is not None and "=" not in stated
    if stated is None or is_nameless or restates(prediction) or not answers_equal(stated, reference, tolerance):
        return False
    return is_result(stated, reference, prompt, is_marked=is_marked)


def answers_right(completion: str, answer: str, *, prompt: str, finish_reason: str, tolerance: float) -> bool:
    """Return whether a response ends with the right answer, marked or not.

    A response without a mark that was cut (``finish_reason`` "length") has none.

    Raises:
        ValueError: the reference answer is empty.
    """
    text = without_end_tokens(own_words(behind_thoughts(completion, prompt))).replace("\u00f7", "\\div ")
    is_choice = reference_choices(reference_answer(answer)) is not None
    has_mark = is_marked(text) or (states_choice(text) if is_choice else states_value(text))
    if not has_mark and (finish_reason == "length" or (not is_choice and restates(text, prompt))):
        return False
    return is_correct(answer_to(text, answer), answer, tolerance, prompt, is_marked=has_mark)


def answer_to(text: str, answer: str) -> str | None:
    """The final answer of ``text`` to a question whose reference is ``answer``: a letter for a choice."""
    if reference_choices(reference_answer(answer)) is not None and not is_marked(text):
        return stated_choice(without_end_tokens(text))
    return final_answer(text)


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
        reference = _joined(reference)
    if not reference:
        raise ValueError("the reference answer is empty")
    return reference


def _joined(text: str) -> str:
    try:
        parts = ast.literal_eval(text)
    # A list that a program has not written, such as ["a" and "b"].
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return ", ".join(parts) if all(isinstance(part, str) for part in parts) else text
