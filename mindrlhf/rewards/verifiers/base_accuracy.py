"""Accuracy for models that start without a chat format."""

from mindrlhf.rewards.answers.extraction import last_boxed
from mindrlhf.rewards.answers.grading import is_correct
from mindrlhf.rewards.registry import register
from mindrlhf.rewards.verifiers.strict_format import strict_format


@register
def base_acc(completion: str, answer: str, *, tolerance: float = 0.0) -> float:
    """1 if the completion has the ``strict_format`` and its box equals ``answer``, else 0.

    The rule of the verifier of this name in MindSpeed-RL. ``tolerance`` as in ``accuracy_reward``.

    Raises:
        ValueError: the reference answer is empty.
    """
    return strict_format(completion, answer) * is_correct(last_boxed(completion), answer, tolerance)
