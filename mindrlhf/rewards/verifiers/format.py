"""Does the completion have the asked-for shape?"""

from mindrlhf.rewards.answers.spelling import without_end_tokens
from mindrlhf.rewards.registry import register

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@register
def format_reward(completion: str, answer: str) -> float:
    """1 if the completion is ``<think>...</think><answer>...</answer>``, else 0.

    Each tag occurs exactly once and in this order; before, between and after the two blocks there is nothing but white
    space, and control tokens at the very end (``<|im_end|>``). This is the format of DeepSeek-R1 (arXiv:2501.12948,
    table 1).
    """
    completion = without_end_tokens(completion).strip()
    if not (completion.startswith("<think>") and completion.endswith("</answer>")):
        return 0.0
    if any(completion.count(tag) != 1 for tag in _TAGS):
        return 0.0
    between = completion[completion.find("</think>") + len("</think>") : completion.find("<answer>")]
    in_order = completion.find("</think>") < completion.find("<answer>")
    return float(in_order and not between.strip())
