"""Is what stands in the box right?"""

from mindrlhf.rewards.answers.extraction import boxed_answer, own_words
from mindrlhf.rewards.answers.grading import is_correct
from mindrlhf.rewards.registry import register_comparing


@register_comparing
def qwen_accuracy_reward(completion: str, answer: str, *, prompt: str = "", tolerance: float = 0.0) -> float:
    """1 if the content of the last ``\\boxed{...}`` equals ``answer``, else 0 (also without a box).

    The box stands behind the thoughts. A later answer that is not in a box must say the same. ``tolerance`` as in
    ``accuracy_reward``.

    Raises:
        ValueError: the reference answer is empty.
    """
    found = boxed_answer(own_words(completion, prompt))
    return float(is_correct(found, answer, tolerance, prompt))
