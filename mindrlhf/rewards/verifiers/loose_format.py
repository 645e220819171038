"""Is there thought, and after it an answer?"""

from mindrlhf.rewards.answers.extraction import response_text
from mindrlhf.rewards.registry import register


@register
def loose_format(completion: str, answer: str, *, prompt: str = "") -> float:
    """1 if ``<think>...</think>`` and after it ``<answer>...</answer>`` occur, whatever stands around; else 0.

    Tags that the template has written at the end of ``prompt`` count too. They are those of DeepSeek-R1
    (arXiv:2501.12948, table 1); the verifier is for models that are only learning them.
    """
    text = response_text(completion, prompt)
    place = 0
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        place = text.find(tag, place)
        if place < 0:
            return 0.0
        place += len(tag)
    return 1.0
