"""Costs of scoring a sample, counted in its worker and summed by the pool."""

from collections import Counter

COUNTED = ("requests", "cached", "unusable", "prompt_tokens", "reply_tokens", "wait_s")

_counts: Counter[str] = Counter()


def add(name: str, amount: float = 1) -> None:
    """Count ``amount`` more of ``name``, one of ``COUNTED``."""
    assert name in COUNTED, f"nobody sums {name}"
    _counts[name] += amount


def take() -> dict[str, float]:
    """Return what has been counted since it was last taken."""
    taken = dict(_counts)
    _counts.clear()
    return taken
