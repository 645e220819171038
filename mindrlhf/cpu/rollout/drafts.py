"""Guesses at the next tokens of samples, made from what the samples of the same group have said so far.

A model that checks several guessed tokens in one step, in place of computing one, makes responses in fewer steps
(Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023). The guesses cost no
model here: after the last tokens comes what most often came after them in the prompt and the responses of the group
(Saxena, "Prompt lookup decoding", 2023; Oliaro et al., "SuffixDecoding", 2024).
"""

from collections.abc import Sequence

# How many tokens before a place tell what comes after it; the longest that was seen before counts.
CONTEXTS = (8, 5, 3, 2)
# A guess is made where what came most often came at least this often, a share.
MIN_SHARE = 0.5


class _Followers:
    """What came after one run of tokens: how often each, and which one most often, the first to get there."""

    __slots__ = ("best", "counts", "total")

    def __init__(self):
        self.counts: dict[int, int] = {}
        self.total = 0
        self.best = -1

    def add(self, token: int) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + 1
        self.total += 1
        if count > self.counts.get(self.best, 0):
            self.best = token


class GroupDrafts:
    """The tokens of one group's samples, and guesses at what comes next."""

    def __init__(self, prompt: Sequence[int]):
        self._prompt = list(prompt)
        self._followers: dict[tuple[int, ...], _Followers] = {}
        self._texts: dict[str, list[int]] = {}
        self._learn(self._prompt, 1)

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        """Add sampled ``tokens`` to the sample ``name``, which begins with the prompt."""
        text = self._texts.setdefault(name, list(self._prompt))
        first = len(text)
        text.extend(tokens)
        self._learn(text, first)

    def guess(self, name: str, num_tokens: int) -> list[int]:
        """Return at most ``num_tokens`` tokens that may come next in the sample ``name``; fewer, also none, where
        nothing is likely."""
        tail = self._texts[name][-CONTEXTS[0] :]
        guessed = []
        while len(guessed) < num_tokens and (token := self._next(tail)) is not None:
            guessed.append(token)
            tail = [*tail, token][-CONTEXTS[0] :]
        return guessed

    def _learn(self, text: list[int], first: int) -> None:
        for end in range(first, len(text)):
            for size in CONTEXTS:
                if size <= end:
                    context = tuple(text[end - size : end])
                    followers = self._followers.get(context)
                    if followers is None:
                        followers = self._followers[context] = _Followers()
                    followers.add(text[end])

    def _next(self, tail: list[int]) -> int | None:
        for size in CONTEXTS:
            followers = self._followers.get(tuple(tail[-size:])) if size <= len(tail) else None
            if followers is not None:
                likely = followers.counts[followers.best] >= MIN_SHARE * followers.total
                return followers.best if likely else None
        return None


def num_drafted(max_tokens: int, num_running: int, num_slots: int) -> int:
    """How many tokens to guess for each of ``num_running`` samples: together with those that they compute anyway at
    most ``num_slots``, so that a step never costs more than one of a server that is full; 0 to ``max_tokens``."""
    return min(max_tokens, max(0, num_slots // max(1, num_running) - 1))


def num_kept(token_ids: Sequence[int], guessed: Sequence[int], ends: frozenset[int], limit: int) -> int:
    """How many of ``token_ids``, sampled after right guesses only, are tokens of the sample: one, and one more for
    each guess from the first that was right; at most ``limit``, and none after one of ``ends``."""
    count = 1
    for token, guess in zip(token_ids, guessed):
        if token != guess or token in ends or count >= limit:
            break
        count += 1
    return count
