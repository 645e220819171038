"""Is the completion short?"""

from mindrlhf.rewards.registry import register

# The length, in tokens, that earns one half.
HALF_REWARD_TOKENS = 1024


@register
def length_reward(completion: str, answer: str, *, num_tokens: int, finish_reason: str) -> float:
    """``1024 / (1024 + n)`` for a response of ``n`` tokens: 0.5 at 1024 of them, towards 0 for long ones.

    It falls with every token at every length, so that two lengths in a group always differ. A response
    that was cut off (``finish_reason == "length"``), or is blank, earns 0: neither is a short answer.
    Meant to be added with a small weight to a reward for being right.
    """
    if finish_reason == "length" or not completion.strip():
        return 0.0
    return HALF_REWARD_TOKENS / (HALF_REWARD_TOKENS + num_tokens)
