"""Does the completion have the asked-for shape?"""

from mindrlhf.rewards.answers.extraction import response_text
from mindrlhf.rewards.answers.spelling import without_end_tokens
from mindrlhf.rewards.registry import register

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@register
def format_reward(completion: str, answer: str, *, prompt: str = "") -> float:
    """1 if the response is ``<think>...</think><answer>...</answer>``, else 0.

    The response is what the template has begun in ``prompt`` (``<think>``), and the completion. Each tag occurs exactly
    once and in this order; before, between and after the two blocks there is nothing but white space, and control
    tokens at the very end (``<|im_end|>``). This is the format of DeepSeek-R1 (arXiv:2501.12948,
    table 1).
    """
    text = without_end_tokens(response_text(completion, prompt)).strip()
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return 0.0
    if any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    between = text[text.find("</think>") + len("</think>") : text.find("<answer>")]
    in_order = text.find("</think>") < text.find("<answer>")
    return float(in_order and not between.strip())
