"""Right or wrong: a final answer against the reference answer of a record."""

from mindrlhf.rewards.answers.choices import reference_choices, stated_choice
from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.answers.extraction import final_answer, has_box
from mindrlhf.rewards.answers.prose import stated_answer
from mindrlhf.rewards.answers.spelling import without_end_tokens


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


def answer_to(completion: str, answer: str) -> str | None:
    """The final answer of ``completion`` to a question whose reference is ``answer``: a letter for a choice."""
    marked = final_answer(completion, is_marked=True)
    is_choice = reference_choices(reference_answer(answer)) is not None
    if marked is None and is_choice and not has_box(completion):
        return stated_choice(without_end_tokens(completion))
    return marked or final_answer(completion)


def reference_answer(answer: str) -> str:
    """The reference without the solution before ``#### ``.

    Raises:
        ValueError: it is empty.
    """
    reference = answer.rpartition("#### ")[2].strip()
    if not reference:
        raise ValueError("the reference answer is empty")
    return reference
