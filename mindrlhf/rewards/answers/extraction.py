"""Finding the final answer in a completion. Everything here takes linear time, whatever the text."""

import re

from mindrlhf.rewards.answers.prose import final_expression
from mindrlhf.rewards.answers.spelling import without_end_tokens

# No answer is longer; it bounds the search for the closing brace in hostile completions.
MAX_BOXED_CHARS = 10_000

_BOXES = ("\\boxed{", "\\boxed {", "\\fbox{")
# As in the authors' code the line may begin below: "Answer:" and a line break.
_ANSWER_LINE = re.compile(r"\banswer[*_ \t]{0,8}:[*_\s]{0,16}([^\n]*)", re.IGNORECASE)
_DISPLAYED = re.compile(r"\$\$\s*([^$]{1,500}?)\s*\$\$|\\\[\s*(.{1,500}?)\s*\\\]", re.DOTALL)
# An escaped character (\{ and \} are printed braces, \\ a line break) is skipped as one.
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}``, braces inside it balanced; None if there is none or it is cut off."""
    box = _last_box(text)
    return None if box is None else box[1]


def has_box(text: str) -> bool:
    """Whether a box is opened in ``text``, closed or not."""
    return any(box in text for box in _BOXES)


def final_answer(text: str, is_marked: bool = False) -> str | None:
    """The final answer of a completion, or None.

    Of these three the one that begins last in the text decides: the line after ``#### ``, the content of
    ``<answer>...</answer>``, the content of ``\\boxed{...}``. A box that is not closed by then was cut off: there is
    no answer. Without any of the three, it is the last expression with a number in it (``prose``), unless
    ``is_marked`` asks for one of the three. Control tokens at the end of the text do not count.
    """
    text = without_end_tokens(text)
    candidates = [found for found in (_last_hashes(text), _last_answer_tag(text), _last_box(text)) if found]
    if candidates:
        return max(candidates, key=lambda found: found[0])[1]
    return None if is_marked else final_expression(text)


def answer_line(text: str) -> str | None:
    """What follows the last ``Answer:`` up to the end of its line, out of its box if it is in one; or None.

    With nothing on that line it is the next one with text. Emphasis and case do not matter. Only the end of the text
    is searched, ``MAX_BOXED_CHARS`` of it.
    """
    tail = without_end_tokens(text)[-MAX_BOXED_CHARS:]
    lines = list(_ANSWER_LINE.finditer(tail))
    if not lines:
        return None
    line = lines[-1][1]
    if has_box(line):
        return last_boxed(tail[lines[-1].start(1) :])
    displayed = _DISPLAYED.match(tail, lines[-1].start(1))
    return line if displayed is None else displayed[1] or displayed[2]


def _last_hashes(text: str) -> tuple[int, str] | None:
    start = text.rfind("#### ")
    if start < 0:
        return None
    line = text[start + len("#### ") :].partition("\n")[0]
    return start, line.partition("</")[0]


def _last_answer_tag(text: str) -> tuple[int, str] | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else (start, text[start + len("<answer>") : end])


def _last_box(text: str) -> tuple[int, str | None] | None:
    """Place and content of the last box; the content is None when the box is not closed."""
    if "box" not in text:
        return None
    start, box = max((text.rfind(box), box) for box in _BOXES)
    return None if start < 0 else (start, _braced(text, start + len(box)))


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for match in _BRACE_OR_ESCAPE.finditer(text, start, start + MAX_BOXED_CHARS):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return text[start : match.start()]
    return None
