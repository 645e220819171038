"""The math verifier: is the final answer right?"""

from mindrlhf.rewards.answers.grading import answers_right
from mindrlhf.rewards.registry import register


@register
def accuracy_reward(
    completion: str, answer: str, *, prompt: str = "", finish_reason: str = "stop", tolerance: float = 0.0
) -> float:
    """1 if the final answer equals ``answer``, else 0.

    Only what stands behind the thoughts of the response counts, also where the template has opened them in ``prompt``.
    There the final answer is what follows ``#### ``, or stands in ``<answer>...</answer>``, in ``\\boxed{...}`` or in
    "the answer is ..." (of several, the one that begins last), or else, unless the response was cut, the last
    expression, as a whole; for a multiple-choice question, the letter it ends up with. The question again is no answer,
    nor is what still is to be computed where a number is asked for (``mindrlhf.rewards.answers.restated``).
    ``answer`` may itself be a solution that ends with
    ``#### 42`` or a box. What is equal: numbers, percentages, units, expressions, intervals, sets
    (``mindrlhf.rewards.answers.equality``). ``tolerance`` is the relative error that numbers may have; with 0,
    decimals of surds are wrong.

    Raises:
        ValueError: the reference answer is empty.
    """
    return float(answers_right(completion, answer, prompt=prompt, finish_reason=finish_reason, tolerance=tolerance))
