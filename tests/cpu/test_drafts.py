"""Guesses at the next tokens: what most often came next, counted again by hand."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.cpu.rollout.drafts import CONTEXTS, MIN_SHARE, GroupDrafts, num_drafted, num_kept

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def expected_guess(texts: list[list[int]], learned: list[list[int]], tail: list[int], count: int) -> list[int]:
    """The same rule over whole texts: ``learned[i]`` is text ``i`` from its first place that counts."""
    guessed: list[int] = []
    while len(guessed) < count:
        words = tail + guessed
        for size in CONTEXTS:
            seen = Counter(
                text[end]
                for text, places in zip(texts, learned)
                for end in places
                if end >= size and size <= len(words) and text[end - size : end] == words[-size:]
            )
            if seen:
                break
        else:
            return guessed
        [(_, most)] = seen.most_common(1)
        if most < MIN_SHARE * seen.total():
            return guessed
        winners = {token for token, times in seen.items() if times == most}
        guessed.append(next(iter(winners)) if len(winners) == 1 else -1)
        if guessed[-1] == -1:  # a tie goes to who was there first, which these counts do not know
            return guessed[:-1]
    return guessed


@given(
    prompt=TOKENS, responses=st.lists(TOKENS, min_size=1, max_size=4), count=st.integers(1, 5), cut=st.integers(1, 5)
)
def test_guesses_are_what_came_next_most_often(prompt, responses, count, cut):
    group = GroupDrafts(prompt)
    for index, response in enumerate(responses):
        for first in range(0, len(response), cut):
            group.extend(str(index), response[first : first + cut])
    texts = [prompt, *(prompt + response for response in responses)]
    places = [list(range(1, len(prompt))), *(list(range(len(prompt), len(text))) for text in texts[1:])]
    for index in range(len(responses)):
        expected = expected_guess(texts, places, texts[index + 1][-CONTEXTS[0] :], count)
        assert group.guess(str(index), count)[: len(expected)] == expected


def test_a_sample_goes_on_as_the_one_before_it_did():
    group = GroupDrafts([9, 9, 1])
    group.extend("first", [2, 3, 4, 5, 6, 7])
    group.extend("second", [2, 3])
    assert group.guess("second", 3) == [4, 5, 6]
    assert group.guess("second", 9) == [4, 5, 6, 7]
    assert group.guess("first", 3) == []


def test_what_is_not_likely_is_not_guessed():
    group = GroupDrafts([1])
    for name, token in zip("abc", (4, 5, 6)):
        group.extend(name, [2, 3, token])
    group.extend("d", [2, 3])
    assert group.guess("d", 2) == []  # a third each


@pytest.mark.parametrize(
    ("max_tokens", "num_running", "num_slots", "expected"),
    [(4, 64, 64, 0), (4, 33, 64, 0), (4, 32, 64, 1), (4, 16, 64, 3), (4, 1, 64, 4), (4, 70, 64, 0), (0, 1, 64, 0)],
)
def test_guesses_take_the_free_slots_only(max_tokens, num_running, num_slots, expected):
    assert num_drafted(max_tokens, num_running, num_slots) == expected


@pytest.mark.parametrize(
    ("sampled", "guessed", "ends", "limit", "expected"),
    [
        ([1, 2, 3], [1, 2], set(), 9, 3),  # all right: the token after them too
        ([1, 2, 3], [1, 5], set(), 9, 2),  # the wrong one is replaced
        ([4, 2, 3], [1, 2], set(), 9, 1),
        ([1, 2, 3], [1, 2], {2}, 9, 2),  # nothing after an end
        ([1, 2, 3], [1, 2], set(), 2, 2),
        ([1, 2, 3], [1, 2], set(), 1, 1),
        ([7], [], set(), 9, 1),
    ],
)
def test_kept_tokens_end_with_the_first_wrong_guess(sampled, guessed, ends, limit, expected):
    assert num_kept(sampled, guessed, frozenset(ends), limit) == expected
