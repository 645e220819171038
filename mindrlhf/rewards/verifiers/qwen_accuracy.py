"""Is what stands in the box right?"""

from mindrlhf.rewards.answers.extraction import last_boxed
from mindrlhf.rewards.answers.grading import is_correct
from mindrlhf.rewards.registry import register


@register
def qwen_accuracy_reward(completion: str, answer: str, *, tolerance: float = 0.0) -> float:
    """1 if the content of the last ``\\boxed{...}`` equals ``answer``, else 0 (also without a box). ``tolerance`` as in
    ``accuracy_reward``.

    Raises:
        ValueError: the reference answer is empty.
    """
    return float(is_correct(last_boxed(completion), answer, tolerance))
