"""Puzzles of islanders who always lie or never do."""

import re

from mindrlhf.rewards.answers.extraction import own_words
from mindrlhf.rewards.answers.prose import denies
from mindrlhf.rewards.registry import register_comparing

# No solution is longer; thousands of statements would only hide the right ones among wrong ones.
MAX_SOLUTION_CHARS = 5000
# Statements of this kind do not say who is what.
_UNDECIDED = re.compile(
    r"\b(?:not|or|if|unless|either|neither|nor|false|untrue|wrong|maybe|perhaps|possibly"
    r"|says?|said|saying|claim(?:s|ed)?|tells?|told|states?|stated|remark(?:s|ed)?|according|would)\b|n't\b",
    re.IGNORECASE,
)
_STATEMENT = re.compile(r"\b(\w+)\s+is\s+(?:an?\s+)?(knight|knave)\b", re.IGNORECASE)


@register_comparing
def knights_and_knaves(completion: str, answer: str, *, prompt: str = "") -> float:
    """1 if the completion's solution names every islander of ``answer``, and nobody else, with the right role; else 0.

    The solution is the content of the last ``<answer>...</answer>`` behind the thoughts, in statements
    ``Zoey is a knave``. Logic-RL (Xie et al. 2025, arXiv:2502.14768) pays 2 for right, -1.5 for wrong and -2 for
    unreadable; weight and format gate give the like.

    Raises:
        ValueError: the reference answer holds no such statement, or says two things of one islander.
    """
    truth = roles(answer)
    if not truth:
        raise ValueError(f"the reference answer {answer[:80]!r} is no solution, such as 'Zoey is a knave'")
    text = own_words(completion, prompt)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    solution, behind = text[start:end], text[end:].removeprefix("</answer>")
    if start < 0 or len(solution) > MAX_SOLUTION_CHARS or _UNDECIDED.search(solution):
        return 0.0
    return float(roles(solution) == truth and not denies(behind) and "<answer>" not in behind)


def roles(text: str) -> dict[str, str] | None:
    """Role by name in statements such as "Zoey is a knave"; None when somebody is said to be both."""
    roles: dict[str, str] = {}
    for name, role in _STATEMENT.findall(text):
        if roles.setdefault(name.lower(), role.lower()) != role.lower():
            return None
    return roles
