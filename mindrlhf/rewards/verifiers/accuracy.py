"""The math verifier: is the final answer right?"""

from mindrlhf.rewards.answers.grading import answers_right
from mindrlhf.rewards.registry import register_comparing


@register_comparing
def accuracy_reward(
    completion: str,
    answer: str,
    *,
    prompt: str = "",
    finish_reason: str = "stop",
    tolerance: float = 0.0,
    marks: str = "",
) -> float:
    """1 if the final answer equals ``answer``, else 0.

    Behind the thoughts the marked answer that begins last counts (``#### ``, ``<answer>``, a box, "the answer is ..."),
    or else, unless the response was cut, the last expression; of a choice the letter it ends up with. ``answer`` may
    be a solution that ends so. ``tolerance`` is the relative error that numbers may have, ``marks`` a JSON file of
    languages beyond those of ``rewards.answers.marks``.

    Raises:
        UserError: ``marks`` is no such file.
        ValueError: the reference answer is empty.
    """
    return float(answers_right(completion, answer, prompt, finish_reason, tolerance, marks))
