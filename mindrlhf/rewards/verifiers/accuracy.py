"""The math verifier: is the final answer right?"""

from mindrlhf.rewards.answers.grading import answers_right
from mindrlhf.rewards.registry import register


@register
def accuracy_reward(
    completion: str, answer: str, *, prompt: str = "", finish_reason: str = "stop", tolerance: float = 0.0
) -> float:
    """1 if the final answer equals ``answer``, else 0.

    Only what stands behind the thoughts of the response counts, also where the template has opened them in ``prompt``:
    what follows ``#### ``, or stands in ``<answer>...</answer>``, in ``\\boxed{...}`` or in "the answer is ..." (of
    several, the one that begins last), or else, unless the response was cut, the last expression, as a whole; for a
    multiple-choice question, the letter it ends up with. The question again is no answer, nor is what is to be computed
    (``mindrlhf.rewards.answers.restated``). ``answer`` may itself be a solution that ends with ``#### 42`` or a box.
    What is equal: ``mindrlhf.rewards.answers.equality``. ``tolerance`` is the relative error that numbers may have.

    Raises:
        ValueError: the reference answer is empty.
    """
    is_right = answers_right(completion, answer, prompt=prompt, finish_reason=finish_reason, tolerance=tolerance)
    return float(is_right)
