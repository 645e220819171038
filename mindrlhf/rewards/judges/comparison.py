"""Shared parts of verifiers that compare the responses to one prompt with each other."""

import hashlib
import re
from collections.abc import Sequence

DEFAULT_RUBRIC = "The better one is more correct, more complete and clearer."
_RANKING = re.compile(r"\branking\b[*\s]*:[*\s]*([0-9\[\]>=\s*]+)", re.IGNORECASE)
_WINNER = re.compile(r"\bwinner\b[*\s]*:[*\s\[]*(A|B|tie)\b", re.IGNORECASE)


def asked(prompt: str, answer: str) -> list[tuple[str, str]]:
    """Return what a judge is shown before the responses: the question, and the reference answer if there is one."""
    return [("Question", prompt), *([("Reference answer", answer)] if answer else [])]


def distinct_responses(completion: str, completions: Sequence[str]) -> list[str]:
    """Return the different texts among the responses, in an order that depends on nothing but them.

    All samples of a prompt so ask the same questions, and equal responses earn the same.
    """
    return sorted({*completions, completion}, key=_digest)


def shuffled(responses: Sequence[str], vote: int) -> list[int]:
    """Return the places of the responses in the order in which a vote shows them: another for each vote."""
    return sorted(range(len(responses)), key=lambda place: _digest(f"{vote} {_digest(responses[place])}"))


def read_ranking(reply: str, num_responses: int) -> list[float]:
    """Return for each shown response the share of the others that it is ranked above; a tie counts half.

    Args:
        reply: ends with ``Ranking: 2 > 1 = 3``, best first; numbers from 1.
        num_responses: shown, 2 or more.

    Raises:
        ValueError: there is no ranking, or it does not name every response once.
    """
    found = list(_RANKING.finditer(reply))
    # The question's own example is no ranking.
    if not found or reply[: found[-1].start()].rstrip(" *\"'").lower().endswith("example:"):
        raise ValueError(f"the judge's answer ends with no 'Ranking: ...': {reply[-100:]!r}")
    text = re.sub(r"[\[\]*]", "", found[-1][1].strip().partition("\n")[0])
    try:
        levels = [[int(number) for number in level.split("=")] for level in text.split(">")]
    except ValueError:
        raise ValueError(f"the judge's ranking {text[:100]!r} is not like 2 > 1 = 3") from None
    if sorted(number for level in levels for number in level) != list(range(1, num_responses + 1)):
        raise ValueError(f"the judge's ranking {text[:100]!r} does not name each of {num_responses} responses once")
    shares = [0.0] * num_responses
    num_below = num_responses
    for level in levels:
        num_below -= len(level)
        for number in level:
            shares[number - 1] = (num_below + (len(level) - 1) / 2) / (num_responses - 1)
    return shares


def read_winner(reply: str) -> float:
    """Return 1 where a judge's answer ends with ``Winner: A``, 0 for ``B``, 0.5 for ``tie``.

    Raises:
        ValueError: it names no winner.
    """
    found = [_WINNER.findall(line) for line in reply.splitlines()]
    last = {winner.lower() for winner in next((line for line in reversed(found) if line), ())}
    # A line with several is the question again.
    if len(last) != 1:
        raise ValueError(f"the judge's answer ends with no 'Winner: A', 'B' or 'tie': {reply[-100:]!r}")
    return {"a": 1.0, "b": 0.0, "tie": 0.5}[last.pop()]


def opponents(place: int, num_responses: int, rounds: int) -> list[int]:
    """Return whom a response meets: all others, or with ``rounds`` its neighbours on a ring, that many on each side."""
    if rounds == 0 or 2 * rounds >= num_responses - 1:
        return [other for other in range(num_responses) if other != place]
    return [(place + step) % num_responses for step in range(-rounds, rounds + 1) if step]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
