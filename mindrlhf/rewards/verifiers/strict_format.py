"""Is the completion thought, then one boxed answer, and nothing else?"""

from mindrlhf.rewards.answers.extraction import response_text
from mindrlhf.rewards.registry import register_comparing
from mindrlhf.rewards.verifiers.format import format_reward

_BOX = "\\boxed{"


@register_comparing
def strict_format(completion: str, answer: str, *, prompt: str = "") -> float:
    """1 if ``format_reward`` is 1 and exactly one ``\\boxed{...}`` occurs, in the answer block; else 0.

    The structure that MindSpeed-RL's ``strict_format`` asks for, which pays -0.5 where this pays 0.
    """
    text = response_text(completion, prompt)
    in_answer = text.find(_BOX) > text.find("<answer>")
    return format_reward(text, answer) * (text.count(_BOX) == 1 and in_answer)
