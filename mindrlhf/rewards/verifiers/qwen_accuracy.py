"""Is what stands in the box right?"""

from mindrlhf.rewards.answers.extraction import last_boxed
from mindrlhf.rewards.answers.grading import is_correct
from mindrlhf.rewards.registry import register


@register
def qwen_accuracy_reward(completion: str, answer: str) -> float:
    """1 if the content of the last ``\\boxed{...}`` equals ``answer``, else 0 (also without a box).

    Raises:
        ValueError: the reference answer is empty.
    """
    return float(is_correct(last_boxed(completion), answer))
