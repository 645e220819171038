"""Is there thought, and after it an answer?"""

from mindrlhf.rewards.registry import register


@register
def loose_format(completion: str, answer: str) -> float:
    """1 if ``<think>...</think>`` and after it ``<answer>...</answer>`` occur, whatever stands around; else 0.

    The tags of DeepSeek-R1 (arXiv:2501.12948, table 1), for models that are only learning them.
    """
    place = 0
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        place = completion.find(tag, place)
        if place < 0:
            return 0.0
        place += len(tag)
    return 1.0
