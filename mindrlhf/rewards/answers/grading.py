"""Right or wrong: a final answer against the reference answer of a record."""

from mindrlhf.rewards.answers.choices import reference_choices, stated_choice
from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.answers.extraction import final_answer


def is_correct(prediction: str | None, answer: str) -> bool:
    """Whether ``prediction`` (None: there is none) means the same as ``answer``.

    Raises:
        ValueError: the reference answer is empty.
    """
    reference = reference_answer(answer)
    return prediction is not None and answers_equal(prediction, reference)


def answer_to(completion: str, answer: str) -> str | None:
    """The final answer of ``completion`` to a question whose reference is ``answer``: a letter for a choice."""
    marked = final_answer(completion, is_marked=True)
    if marked is None and reference_choices(reference_answer(answer)) is not None:
        return stated_choice(completion)
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
