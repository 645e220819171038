"""Is the response about to be cut off?"""

from mindrlhf.rewards.registry import register
from mindrlhf.sandbox import time_limit


@register
def overlong_penalty(completion: str, answer: str, *, num_tokens: int, max_length: int, buffer: int) -> float:
    """0 up to ``max_length - buffer`` tokens, from there linearly down to -1 at ``max_length``.

    Soft overlong punishment: Yu et al. 2025 (arXiv:2503.14476), eq. 13. As a verifier it can be gated and is
    reported by itself; do not combine it with the penalty that the algorithm may add.

    Raises:
        ValueError: the buffer is not between 1 and ``max_length``.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer}: it must be between 1 and max_length = {max_length}")
    with time_limit.uncounted():  # NumPy, which workers without this verifier do not load
        from mindrlhf.algorithms.overlong import soft_punishment
    return float(soft_punishment(num_tokens, max_length, buffer))
