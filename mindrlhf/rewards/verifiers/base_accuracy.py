"""Accuracy for models that start without a chat format."""

from mindrlhf.rewards.answers.extraction import boxed_answer, own_words
from mindrlhf.rewards.answers.grading import is_correct
from mindrlhf.rewards.registry import register_comparing
from mindrlhf.rewards.verifiers.strict_format import strict_format


@register_comparing
def base_acc(completion: str, answer: str, *, prompt: str = "", tolerance: float = 0.0) -> float:
    """1 if the completion has the ``strict_format`` and its box equals ``answer``, else 0.

    The rule of the verifier of this name in MindSpeed-RL. ``tolerance`` as in ``accuracy_reward``.

    Raises:
        ValueError: the reference answer is empty.
    """
    found = boxed_answer(own_words(completion, prompt))
    return strict_format(completion, answer, prompt=prompt) * is_correct(found, answer, tolerance, prompt)
