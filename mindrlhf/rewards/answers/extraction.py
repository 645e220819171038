"""Finding the final answer in a response, behind its thoughts. Everything here takes linear time, whatever the text.

A response is the completion and what the chat template has written before it in the prompt (``response_text``). Its
thoughts are drafts: what counts stands behind them (``behind_thoughts``), and of several answers there the last.
"""

import re
from collections import deque
from collections.abc import Sequence

from mindrlhf.rewards.answers.equality import answers_equal
from mindrlhf.rewards.answers.marks import pattern
from mindrlhf.rewards.answers.prose import (
    MAX_LINE_CHARS,
    Mark,
    denies,
    final_expression,
    is_denied,
    other_value,
    stated_answers,
    value_beside,
)
from mindrlhf.rewards.answers.spelling import without_end_tokens

# No answer is longer; it bounds the search for the closing brace in hostile completions.
MAX_BOXED_CHARS = 10_000
# What a template writes at the end of a prompt is no longer.
MAX_PREFILL_CHARS = 2_000
# More answers side by side are looked at one by one no further.
MAX_JOINED = 12

_OWN = r"think|thinking|thoughts?|reason|reasoning|reflect|reflection|scratchpad|analysis|deliberation|monologue"
_TAG = rf"(?:[a-z]{{1,20}}[:_])?(?:{_OWN})(?:_[a-z]{{1,20}})?"
# Thoughts by the tags of XML (DeepSeek-R1, Qwen3, Seed-OSS ...) and those of OpenThoughts, Command A, Magistral, Kimi,
# Apertus, Gemma and gpt-oss, opening and closing.
# Every branch begins with a sign that is rare, so that texts are searched fast.
_THOUGHT_MARK = re.compile(
    rf"<\s*(?P<closed>/?)\s*(?P<tag>{_TAG})(?:\s[^<>]{{0,60}})?>"
    r"|<(?P<opening>\|begin_of_thought\|>|\|START_THINKING\|>|\|inner_prefix\|>|\|think_start\|>|\|think\|>"
    r"|\|channel>thought|unused94>thought|\|channel\|>\s*(?:analysis|commentary))"
    r"|<(?P<closing>\|end_of_thought\|>|\|END_THINKING\|>|\|inner_suffix\|>|\|think_end\|>|\|/think\|>|channel\|>"
    r"|unused95>|\|channel\|>\s*final\s*<\|message\|>)"
    r"|\[(?P<closed_bracket>/?)THINK\]|\u25c1(?P<closed_triangle>/?)think\u25b7",
    re.IGNORECASE,
)
_MARK_BEGINNINGS = ("<", "[", "\u25c1")
# The last words of a prompt that the template's own turn begins with, and its tags at the very end without such words.
_GENERATION_PROMPT = re.compile(
    r"<\|im_start\|>assistant(?:<\|im_sep\|>)?|<\|start_header_id\|>assistant<\|end_header_id\|>|<start_of_turn>model"
    r"|<\|turn>model|<\|start\|>assistant|<[|\uff5c]assistant[|\uff5c]>|<\|im_assistant\|>assistant<\|im_middle\|>"
    r"|<\|start_of_role\|>assistant<\|end_of_role\|>|<\|CHATBOT_TOKEN\|>|\[/INST\]",
    re.IGNORECASE,
)
_FINAL_TAGS = re.compile(rf"<{_TAG}>\s*(?:</{_TAG}>\s*)?(?:<answer>\s*)?$|<answer>\s*$", re.IGNORECASE)

_TOOL_TURN = re.compile(r"<tool_call>(?:(?!<tool_call>).)*?</tool_call>|<tool_response>.*?</tool_response>", re.DOTALL)

# In a box without braces, as MATH has them, stands what no space or dollar sign ends.
_BOX = re.compile(
    r"\\(?:boxed|fbox|framebox)(?:\s{0,3}\{|\s{0,3}(?![A-Za-z{])(?P<bare>(?:\{[^{}]{0,60}\}|[^\s{}$]){1,60}))"
)
# As in the authors' code the line may begin below: "Answer:" and a line break.
_ANSWER_LINE = re.compile(r"\banswer[*_ \t]{0,8}:[*_\s]{0,16}([^\n]*)", re.IGNORECASE)
_DISPLAYED = re.compile(r"\$\$\s*([^$]{1,500}?)\s*\$\$|\\\[\s*(.{1,500}?)\s*\\\]", re.DOTALL)
# Between answers that belong together, or are both kept open.
_JOINT = (
    r"(?:\s|[$.*~:]|\\[()\[\],;! ]|\\q?quad|</?answer>)*"
    r"(?:,|;|/|\\(?:text|mathrm)\s*\{\s*(?:<joins>|,)\s*\}|<joins>|(?<=</answer>)(?=\s*<answer>))"
    r"(?:\s|[$*~,.\-]|\\[()\[\],;! ]|\\q?quad|</?answer>|<answer>|<equals>|\b(?:also|the|it|it's)\b|[a-z]\s*=|=)*"
)
# "So 41. Time: 42"
_FOOTER = r"(\b(?:so|thus|hence),? (?:it is |[a-z] = )?\$?-?[0-9.,]*[0-9]\$?\.)\s+(?!<answer>|<concludes>)[a-z]+: .*\Z"
# Around a box that is part of an expression, and so no answer: x > \boxed{42}, \frac{\boxed{42}}{2}, twice \boxed{42}.
_GOES_ON_BEFORE = re.compile(
    r"(?:[0-9]|[-\u2212](?:(?<=[\w)}\]].)|(?<=[0-9)}\]] .)|(?<=\b[A-Za-z] .))|\+(?:(?<=[\w)}].)|(?<=[\w)}] .))\s*"
    r"|[<>](?:(?<=\b[A-Za-z] .)|(?<=[0-9)}\]] .)|(?<=\b[A-Za-z].)(?<![</]..)|(?<=[0-9)}\]].)(?<![A-Za-z]..))\s*\$?"
    r"|/(?<=[0-9)].)|\^\{?|_(?<=[0-9A-Za-z)}].)\{?|\u2260\s*|\((?:(?<=\b[A-Za-z].)|\s*-?[0-9.]+\s*,\s*)"
    r"|\\(?:cdot|times|div|neq?|[gl]t|pm|mp|log|ln|sqrt\s*\{|[dt]?frac\s*\{(?:[^{}]*\}\s*\{)?)\s*)\Z"
)
_WORDS_BEFORE = re.compile(
    r"(?i:\b(?:half of|twice|[0-9]+ (?:times|plus|minus)|(?:square|cube)(?: root)? of|different from"
    r"|(?<!\bno )(?<!\bnot )(?:more|less|greater|larger|smaller|bigger|fewer|higher|lower) than)[ $]*\Z)"
)
_MAX_OPERAND_CHARS = 40
_GOES_ON_BEHIND = re.compile(
    r"[0-9]|\.[0-9]| *\^(?! *\{? *(?:\\circ|\\prime|\u00b0))| *(?:[-+]|plus|minus) *[0-9]"
    r"| *\\(?:cdot|times|div|sqrt|pi)(?![A-Za-z])|, *-?[0-9.]+ *\)"
)
# In front of a box, its sign.
_MINUS = re.compile(
    r"(?:[-\u2212](?:(?<=^.)|(?<=[=:,.$*(\[{\n].)|(?<=[=:,.$*(\[{\n] .)|(?<=[A-Za-z]{2}\s.))|=\s*[-\u2212]\s+"
    r"|[MNmn](?<![0-9)}$] .)(?<!\b[A-Za-z] .)(?:inus|egative)\s+\$?)\Z"
)
# "41 \approx 42": integers that are equated, and differ; 38 \approx 40 is rounded.
_DIFFERS = re.compile(
    r"(?:^|[$=\u2248\n](?<!\\\$)|\\approx)\s*([0-9]{1,15})\s*(?:=|\u2248|\\approx)\s*\$?(?!\1\Z)[0-9]*[1-9]\Z"
)
# An escaped character (\{ and \} are printed braces, \\ a line break) is skipped as one.
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)


def prefilled(prompt: str) -> str:
    """Return the beginning of the response that the chat template wrote at the end of ``prompt``: ``<think>``.

    Words before the first tag ("Let me think.") are no part of it.
    """
    tail = prompt[-MAX_PREFILL_CHARS:]
    turns = list(_GENERATION_PROMPT.finditer(tail))
    if turns:
        tail = tail[turns[-1].end() :]
        return tail[max(tail.find("<"), 0) :] if "<" in tail else tail.lstrip()
    tags = _FINAL_TAGS.search(tail)
    return "" if tags is None else tags.group()


def response_text(completion: str, prompt: str = "") -> str:
    """The whole response: what the template has begun in ``prompt``, then ``completion``."""
    return prefilled(prompt) + completion if prompt else completion


def behind_thoughts(completion: str, prompt: str = "") -> str:
    """Return the part of a response behind its thoughts; nothing when a thought is not closed.

    A closing mark without an opening one closes too: the template may have opened the thought in a prompt that is not
    known. Without any marks it is the whole response.
    """
    text = response_text(completion, prompt)
    if not any(beginning in text for beginning in _MARK_BEGINNINGS):
        return text
    opened: set[str] = set()
    start = 0
    for mark in _THOUGHT_MARK.finditer(text):
        name = (mark["tag"] or "").lower()
        # None where the mark is of another kind, empty where it opens.
        closed = [mark["closed"], mark["closed_bracket"], mark["closed_triangle"], mark["closing"]]
        if mark["opening"] is not None or "" in closed:
            opened.add(name)
        else:
            opened.discard(name)
            start = mark.end()
    return "" if opened else text[start:]


def own_words(completion: str, prompt: str = "") -> str:
    """The part of a response behind its thoughts, without calls of tools and their replies, which are no answer."""
    text = behind_thoughts(completion, prompt)
    return _TOOL_TURN.sub("\n", text) if "</tool_" in text else text


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}``, braces inside it balanced; None if there is none or it is cut off."""
    boxes = _boxes(text)
    return boxes[-1].content if boxes else None


def has_box(text: str) -> bool:
    """Return whether a box is opened in ``text``, closed or not."""
    return _BOX.search(text) is not None


def is_marked(text: str) -> bool:
    """Return whether ``text`` marks an answer: ``#### ``, ``<answer>...</answer>`` or a box, closed or not."""
    return "#### " in text or bool(_answer_tags(text)) or has_box(text)


def answer_marks(text: str) -> list[Mark]:
    """Marks of answers in ``text``, a text behind its thoughts without end tokens, in order; the last ones of each.

    These are a line after ``#### ``, ``<answer>...</answer>``, ``\\boxed{...}`` and "the answer is ..." (``marks``).
    """
    found = [*_hashes(text), *_answer_tags(text), *_boxes(text)]
    stated = [mark for mark in stated_answers(text) if not any(mark.start < other.end for other in found)]
    return sorted([*found, *stated], key=lambda mark: mark.start)


def final_answer(text: str, marks: Sequence[Mark]) -> str | None:
    """The final answer of ``text``, that of the last of its ``answer_marks``; or None.

    A box that is not closed is none. Without any mark it is the last expression (``prose``). Answers side by side
    ("\\boxed{1} or \\boxed{2}") are a list; one that the text denies or takes back is none.
    """
    return _settled(text, marks) if marks else final_expression(text[:-99] + pattern(_FOOTER).sub(r"\1", text[-99:]))


def boxed_answer(text: str) -> str | None:
    """The content of the last box, or None without one; also None when what stands behind it says otherwise."""
    text = without_end_tokens(text)
    return _settled(text, _boxes(text))


def answer_line(text: str) -> str | None:
    """Return what follows the last ``Answer:`` up to the end of its line, out of its box if it is in one; or None.

    With nothing on that line it is the next one with text. Emphasis and case do not matter. Only the end of the text
    is searched, ``MAX_BOXED_CHARS`` of it. What stands behind it must not say otherwise.
    """
    tail = without_end_tokens(text)[-MAX_BOXED_CHARS:]
    lines = list(_ANSWER_LINE.finditer(tail))
    if not lines:
        return None
    start, end, line = lines[-1].start(1), lines[-1].end(1), lines[-1][1]
    if has_box(line):
        return _settled(tail, [mark for mark in _boxes(tail) if mark.start >= start])
    displayed = _DISPLAYED.match(tail, start)
    if displayed is not None:
        end, line = displayed.end(), displayed[1] or displayed[2]
    return _settled(tail, [Mark(start, end, line)])


def _settled(text: str, marks: Sequence[Mark]) -> str | None:
    """The answer of the last of ``marks``, with those beside it; None where the text around denies or changes it."""
    if not marks or marks[-1].content is None:
        return None
    joined = [marks[-1]]
    for mark in reversed(marks[:-1]):
        if mark.end > joined[0].start:  # an answer block around its box
            continue
        between = text[max(mark.end, joined[0].start - 60) : joined[0].start]
        is_beside = pattern(_JOINT).fullmatch(between) or not between
        if mark.content is None or not is_beside:
            break
        joined.insert(0, mark)
    answer, before, behind = marks[-1].content, text[: joined[0].start], text[joined[-1].end :]
    if is_denied(before) or denies(behind) or _is_part(text, marks[-1]):
        return None
    later = [mark.content for mark in (*stated_answers(behind), *_hashes(behind), *_boxes(behind))]
    others = [value for value in (value_beside(before), other_value(behind), *later) if value is not None]
    if not all(answers_equal(other, answer) for other in others):
        return None
    contents = [mark.content for mark in joined]
    if all(answers_equal(content, answer) for content in contents[:-1]):
        return answer
    return ", ".join(contents)


def _hashes(text: str) -> list[Mark]:
    found, end = [], len(text)
    while len(found) < MAX_JOINED and (start := text.rfind("#### ", 0, end)) >= 0:
        line = text[start + len("#### ") :].partition("\n")[0].partition("</")[0]
        found.insert(0, Mark(start, start + len("#### ") + len(line), line))
        end = start
    return found


def _answer_tags(text: str) -> list[Mark]:
    found, before = [], len(text)
    while len(found) < MAX_JOINED and (end := text.rfind("</answer>", 0, before)) >= 0:
        start = text.rfind("<answer>", 0, end)
        if start < 0:
            break
        found.insert(0, Mark(start, end + len("</answer>"), text[start + len("<answer>") : end]))
        before = start
    return found


def _boxes(text: str) -> list[Mark]:
    """The last boxes, in order, without those around another."""
    boxes: list[Mark] = []
    for match in reversed(deque(_BOX.finditer(text), maxlen=MAX_JOINED)):
        content = _braced(text, match.end()) if match["bare"] is None else match["bare"].rstrip(".,;:")
        close = match.end() if match["bare"] is not None else len(text)
        close = match.end() + len(content) + 1 if match["bare"] is None and content is not None else close
        if not boxes or (content is not None and close <= boxes[0].start):
            if content and _MINUS.search(text, max(0, match.start() - 12), match.start()):
                content = f"-({content})"
            boxes.insert(0, Mark(match.start(), close, content))
        elif content is None:
            break
    return boxes


def _is_part(text: str, mark: Mark) -> bool:
    """Return whether ``mark`` is a box in an expression, or stands in one beside other values: ``7 or \\boxed{8}``."""
    is_box = text.startswith("\\", mark.start)
    before = text[max(0, mark.start - _MAX_OPERAND_CHARS) : mark.start]
    is_word = before.rstrip(" $").endswith(("of", "twice", "times", "plus", "minus", "from", "than"))
    if is_box and (_GOES_ON_BEFORE.search(before) or (is_word and _WORDS_BEFORE.search(before))):
        return True
    if is_box and (_GOES_ON_BEHIND.match(text, mark.end) or _DIFFERS.search(f"{before}{mark.content}")):
        return True
    start = max(0, mark.start - MAX_LINE_CHARS)
    for match in _BOX.finditer(text[start : mark.start]):
        content = _braced(text, start + match.end()) if match["bare"] is None else None
        if content is not None and start + match.end() + len(content) >= mark.end:
            return content.strip("$ ") != text[mark.start : mark.end]
    return False


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
