"""Right or wrong: the final answer of a response against the reference answer of a record."""

import ast
import re

from mindrlhf.rewards.answers.choices import reference_choices, stated_choice
from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.answers.extraction import final_answer, has_box, is_marked, last_boxed
from mindrlhf.rewards.answers.prose import stated_answer
from mindrlhf.rewards.answers.spelling import without_end_tokens

# ["7"], ['7']: OlympiadBench and others keep a list of answers.
_LIST = re.compile(r"\[\s*([\"']).*\1\s*\]", re.DOTALL)


def is_correct(prediction: str | None, answer: str, tolerance: float = 0.0) -> bool:
    """Whether ``prediction`` (None: there is none) means the same as ``answer``, or is a sentence that states it.

    ``tolerance`` is the relative error that numbers may have.

    Raises:
        ValueError: the reference answer is empty.
    """
    reference = reference_answer(answer)
    if prediction is None:
        return False
    if answers_equal(prediction, reference, tolerance):
        return True
    if " " not in prediction.strip():
        return False
    if reference_choices(reference) is not None:
        return stated_choice(without_end_tokens(prediction)) == reference
    stated = stated_answer(prediction)
    return stated is not None and answers_equal(stated, reference, tolerance)


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
