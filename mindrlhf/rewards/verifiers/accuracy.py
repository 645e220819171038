"""Is the final answer right?"""

from mindrlhf.rewards.extraction import final_answer, last_boxed
from mindrlhf.rewards.math_equality import answers_equal
from mindrlhf.rewards.registry import register


@register
def accuracy_reward(completion: str, answer: str) -> float:
    """1 if the final answer equals ``answer``, else 0.

    The final answer is what follows ``#### ``, or stands in ``<answer>...</answer>`` or in ``\\boxed{...}`` (of
    several, the one that begins last), or else the last number of the completion. ``answer`` may itself be a
    solution that ends with ``#### 42``.

    Raises:
        ValueError: the reference answer is empty.
    """
    return _score(final_answer(completion), answer)


@register
def qwen_accuracy_reward(completion: str, answer: str) -> float:
    """1 if the content of the last ``\\boxed{...}`` equals ``answer``, else 0 (also without a box).

    Raises:
        ValueError: the reference answer is empty.
    """
    return _score(last_boxed(completion), answer)


def _score(prediction: str | None, answer: str) -> float:
    reference = answer.rpartition("#### ")[2].strip()
    if not reference:
        raise ValueError("the reference answer is empty")
    return float(prediction is not None and answers_equal(prediction, reference))
