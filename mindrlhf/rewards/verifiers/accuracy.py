"""The math verifier: is the final answer right?"""

from mindrlhf.rewards.answers.extraction import behind_thoughts
from mindrlhf.rewards.answers.grading import answer_to, is_correct
from mindrlhf.rewards.registry import register


@register
def accuracy_reward(completion: str, answer: str, *, prompt: str = "", tolerance: float = 0.0) -> float:
    """1 if the final answer equals ``answer``, else 0.

    Only what stands behind the thoughts of the response counts, also where the template has opened them in ``prompt``.
    There the final answer is what follows ``#### ``, or stands in ``<answer>...</answer>``, in ``\\boxed{...}`` or in
    "the answer is ..." (of several, the one that begins last), or else the last expression, as a whole; for a
    multiple-choice question, the letter it ends up with. ``answer`` may itself be a solution that ends with
    ``#### 42`` or a box. What is equal: numbers, percentages, units, expressions, intervals, sets
    (``mindrlhf.rewards.answers.equality``). ``tolerance`` is the relative error that numbers may have; with 0,
    decimals of surds are wrong.

    Raises:
        ValueError: the reference answer is empty.
    """
    return float(is_correct(answer_to(behind_thoughts(completion, prompt), answer), answer, tolerance))
