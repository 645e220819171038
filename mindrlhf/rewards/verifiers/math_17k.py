"""Accuracy on DAPO-Math-17k and other data of competition problems."""

from mindrlhf.rewards.answers.extraction import answer_line, boxed_answer, has_box, own_words
from mindrlhf.rewards.answers.grading import is_correct
from mindrlhf.rewards.registry import register_comparing


@register_comparing
def math_17k_acc(completion: str, answer: str, *, prompt: str = "", tolerance: float = 0.0) -> float:
    """1 if the last ``\\boxed{...}``, or without one the last ``Answer: ...``, equals ``answer``; else 0.

    The rule of the verifier of this name in MindSpeed-RL, which grades the box; the line is what the prompts of
    DAPO-Math-17k ask for (Yu et al. 2025, arXiv:2503.14476). Both count behind the thoughts only. A box that is not
    closed is no answer. ``tolerance`` as in ``accuracy_reward``.

    Raises:
        ValueError: the reference answer is empty.
    """
    text = own_words(completion, prompt)
    found = boxed_answer(text) if has_box(text) else answer_line(text)
    return float(is_correct(found, answer, tolerance, prompt))
