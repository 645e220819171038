"""Finding the final answer in a completion. Everything here takes linear time, whatever the text."""

import re

from mindrlhf.rewards.answers.numeric import last_number

# No answer is longer; it bounds the search for the closing brace in hostile completions.
MAX_BOXED_CHARS = 10_000

_BOX = "\\boxed{"
_ANSWER_LINE = re.compile(r"\banswer[*_ \t]{0,8}:[*_ \t]{0,8}([^\n]*)", re.IGNORECASE)
# An escaped character (\{ and \} are printed braces, \\ a line break) is skipped as one.
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}``, braces inside it balanced; None if there is none or it is cut off."""
    start = text.rfind(_BOX)
    return None if start < 0 else _braced(text, start + len(_BOX))


def final_answer(text: str, is_marked: bool = False) -> str | None:
    """The final answer of a completion, or None.

    Of these three the one that begins last in the text decides: the line after ``#### ``, the content of
    ``<answer>...</answer>``, the content of ``\\boxed{...}``. Without any, it is the last number in the text, unless
    ``is_marked`` asks for one of the three.
    """
    candidates = [found for found in (_last_hashes(text), _last_answer_tag(text), _last_box(text)) if found]
    if candidates:
        return max(candidates)[1]
    return None if is_marked else last_number(text)


def answer_line(text: str) -> str | None:
    """What follows the last ``Answer:`` up to the end of its line, out of its box if it is in one; or None.

    Emphasis and case do not matter. Only the end of the text is searched, ``MAX_BOXED_CHARS`` of it.
    """
    lines = _ANSWER_LINE.findall(text[-MAX_BOXED_CHARS:])
    if not lines:
        return None
    boxed = last_boxed(lines[-1])
    return lines[-1] if boxed is None else boxed


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


def _last_box(text: str) -> tuple[int, str] | None:
    start = text.rfind(_BOX)
    if start < 0:
        return None
    content = _braced(text, start + len(_BOX))
    return None if content is None else (start, content)


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
