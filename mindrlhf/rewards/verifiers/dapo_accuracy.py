"""Accuracy as DAPO rewards it."""

from mindrlhf.rewards.answers.extraction import answer_line, own_words
from mindrlhf.rewards.answers.grading import is_correct
from mindrlhf.rewards.answers.spelling import without_end_tokens
from mindrlhf.rewards.registry import register_comparing

# In the reference implementation too; it keeps answers in the middle of the reasoning from counting.
MAX_TAIL_CHARS = 300


@register_comparing
def acc_for_dapo(completion: str, answer: str, *, prompt: str = "", tolerance: float = 0.0) -> float:
    """1 if the last ``Answer: ...`` in the last 300 characters equals ``answer``, else -1.

    The answer may stand below ``Answer:``, on the next line with text. Thoughts, and control tokens that end the
    completion, do not count. ``tolerance`` as in ``accuracy_reward``.

    Rewards as in Yu et al. 2025 (arXiv:2503.14476), eq. 7; the line and the tail as in the authors' code (verl,
    ``math_dapo``).

    Raises:
        ValueError: the reference answer is empty.
    """
    tail = without_end_tokens(own_words(completion, prompt))[-MAX_TAIL_CHARS:]
    return 1.0 if is_correct(answer_line(tail), answer, tolerance, prompt) else -1.0
