"""Answers to multiple-choice questions: which letters are chosen."""

import functools
import re

from mindrlhf.rewards.answers.marks import pattern
from mindrlhf.rewards.answers.prose import denies, is_rejected

# Where prose states its choice; no more of its end is searched.
MAX_TAIL_CHARS = 300
# No written choice is longer, the option's text included.
MAX_CHOICE_CHARS = 500

_WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|rm)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"\(?([A-J])\)?\.?")
_LIST = re.compile(r"\(?[A-J]\)?(?:\s*(?:,|;|&|and|\s)\s*\(?[A-J]\)?)+")
_WITH_TEXT = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:\(([A-J])\)|([A-J])(?:[.):]| -(?= )))(?:\s.*)?", re.DOTALL | re.IGNORECASE
)
_OPTION = re.compile(r"(?:\(([A-J])\)|([A-J])[.):\uff0e])\s+(\S.*)", re.DOTALL)
_NAMED = re.compile(r"(?:option|choice|answer)\s*:?\s*\(?([A-J])\)?\.?", re.IGNORECASE)
# "a" and "I" are words too: as letters of choices they stand at the end, before a mark, or in brackets.
_ALONE = r"(?=\s*(?:[.,;:!?)*$}\"]|$|\n|[^\x00-\u0fff]|because\b|since\b|as\b|which\b))"
_BEFORE = r"(?:[*$({\"']|\\(?:text|textbf|mathbf|mathrm)\s*\{)*"
_AT_THE_END = re.compile(r"(?:^|[,:\n])\s*\**([A-J])\**\.?\s*$")
_STATED = (
    r"(?:(?<![<>/])<answer>(?:[^\n.:;!?=0-9$\\()]{0,30}?(?:\s<equals>|(?=[^\x00-\u0fff])<equals>))?|<choose>)[\s:*]*"
    r"(?:(?:for sure|surely|definitely|clearly|therefore|simply|the|<equals>|<concludes>)\s+)?(?:<choose>[\s:]*)?"
    rf"(?:{_BEFORE}(?-i:([B-HJ]))(?![A-Za-z0-9'])|{_BEFORE}(?-i:([AIa-j]))(?![A-Za-z0-9']){_ALONE}"
    r"|[({{]+(?-i:([A-Ja-j]))[)}}])"
)
# "or C", "No, C": another letter behind the one that is stated.
_ANOTHER = (
    r"^[\s*)$}.,]*(?:/|<joins>|\bbut\b)[\s*($]*(?:(?:maybe|perhaps|possibly|also|even|option) )*"
    r"\(?(?-i:[A-J])(?![A-Za-z])"
    r"|\b(?:no|wait|actually|rather|instead|correction)\b[,.:\s]*(?:it is |it's |it should be )?[*(]*(?-i:[A-J])\b(?!')"
)
# Between letters that are compared, not listed.
_CHOOSING = re.compile(
    r"\b(?:so|thus|hence|therefore|but|not|wrong|right|correct|true|false|choose|pick)\b|n't\b", re.IGNORECASE
)
_IN_PARENTHESES = re.compile(r"\(([A-J])\)")


@functools.lru_cache(64)  # all samples of a group have one reference, which is looked at several times
def reference_choices(text: str) -> frozenset[str] | None:
    """The letters of a reference: one, alone or with its option (``B. 42``), or several with commas; else None."""
    text = unwrapped(text)
    if _LIST.fullmatch(text):
        return frozenset(re.findall("[A-J]", text))
    match = _LETTER.fullmatch(text) or _OPTION.fullmatch(text)
    return None if match is None else frozenset(next(letter for letter in match.groups() if letter))


def option_text(text: str) -> str:
    """The text behind the letter of an option: ``42`` of ``B. 42``; "" where ``text`` is none."""
    match = _OPTION.fullmatch(unwrapped(text))
    return "" if match is None else match[3]


def chosen(text: str) -> frozenset[str] | None:
    """The letters that a final answer chooses: ``B``, ``(B)``, ``B. 42``, ``option B``, ``A, C``, ``AC``; or None."""
    text = unwrapped(text)
    if len(text) > MAX_CHOICE_CHARS:
        return None
    letters = reference_choices(text)
    if letters is not None:
        return letters
    if re.fullmatch("[A-J]{2,}", text) and len(set(text)) == len(text):
        return frozenset(text)
    match = _NAMED.fullmatch(text) or _WITH_TEXT.fullmatch(text)
    if match is None:
        return None
    # "(A) and (B)" chooses two; it is not option A with the text "and (B)".
    others = set(_IN_PARENTHESES.findall(text))
    letter = next(group for group in match.groups() if group).upper()
    return frozenset({letter, *others})


def stated_choice(text: str) -> str | None:
    """The letter that running text ends up with ("So the answer is (B)."), or None."""
    tail = text[-MAX_TAIL_CHARS:]
    for is_stated, mark in ((True, pattern(_STATED)), (False, _IN_PARENTHESES), (False, _AT_THE_END)):
        matches = [match for match in mark.finditer(tail) if not is_stated or not _is_denied(tail, match)]
        if matches:
            before, behind = tail[: matches[-1].start()], tail[matches[-1].end() :]
            is_open = pattern(_ANOTHER).search(behind) or denies(behind) or (not is_stated and is_rejected(before))
            is_open = is_open or pattern(r"<denies>[^\w]*(?:\w+\s+)?\(?$").search(before)
            if is_open or (not is_stated and (_is_listing(tail, matches) or re.search(r"\b[A-J]\s*$", before))):
                return None
            return next(letter for letter in matches[-1].groups() if letter).upper()
    letters = chosen(text) if len(text) <= MAX_CHOICE_CHARS else None
    return next(iter(letters)).upper() if letters is not None and len(letters) == 1 else None


def states_choice(text: str) -> bool:
    """Return whether running text says of a letter that it is the answer, the option or the choice."""
    return pattern(_STATED).search(text[-MAX_TAIL_CHARS:]) is not None


def _is_denied(text: str, match: re.Match[str]) -> bool:
    """Return whether a letter is denied where it is stated: "the answer is not B"."""
    return is_rejected(text[: match.start()]) or pattern("<denies|rejects>").search(match.group()) is not None


def _is_listing(text: str, matches: list[re.Match[str]]) -> bool:
    """Return whether the last letter only ends a list of options, a line behind the letter before it at most."""
    if len(matches) < 2:
        return False
    letters = [next(letter for letter in match.groups() if letter).upper() for match in matches[-2:]]
    between = text[matches[-2].end() : matches[-1].start()]
    return ord(letters[1]) - ord(letters[0]) == 1 and between.count("\n") < 2 and not _CHOOSING.search(between)


def unwrapped(text: str) -> str:
    """Text without LaTeX's marks of text and bold around it."""
    return _WRAPPING.sub(r"\1", text).strip().strip("*$").strip()
