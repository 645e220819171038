"""The answer in running text that marks none: its last expression, as a whole or not at all.

``so it is \\frac{3}{4}.`` answers ``\\frac{3}{4}``, never 4; ``2x = 10`` answers the equation, never 10; ``6 * 7 = 42``
answers 42. Only the end of the text is looked at.
"""

import re

from mindrlhf.rewards.answers.forms import MAX_PARTS, is_constant
from mindrlhf.rewards.answers.numeric import MAX_NUMBER_CHARS
from mindrlhf.rewards.answers.spelling import plain_unicode
from mindrlhf.rewards.answers.units import FACTORS, is_measure

# A final expression and what stands around it on its line.
MAX_LINE_CHARS = 500
MAX_UNICODE_TAIL_CHARS, MAX_SENTENCE_CHARS = 2000, 1000

# "... is $18.00, I think": a number by itself, seen without taking the line apart.
_ALONE = re.compile(
    r"(?:(?<![\\A-Za-z{])(?!(?:sqrt|sin|cos|tan|log|ln|exp|pi|and|or|in|of|mod)\b)[A-Za-z]{2,}:? |(?<!\w)\*\*)"
    r"([-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)(?:\*\*)?(?:[.,;!?]?\s*$|[.,;]\s+[A-Za-z])"
)
_SPAN = re.compile(
    r"\$\$(.+?)\$\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|(?<![\\$])\$(?! )([^$\n]+?)(?<![ \\])\$(?![0-9])", re.DOTALL
)
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
_TOKEN = re.compile(
    r"\\(?:[A-Za-z]+|.)|[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]+|\s+|<<|>>|=>|->|\*\*|.", re.DOTALL
)
_BREAKING_COMMANDS = re.compile(
    r"\\(?:text[a-z]*|quad|qquad|implies|[Rr]ightarrow|therefore|item|begin|end|\\|newline|so|to|Longrightarrow)"
)
_MODULUS = re.compile(r"\bmod[\s{]*$")
_IN_PARTS = re.compile(r"[0-9]\s+(?:in|out of)\s+$")
_MATRIX = re.compile(r"\\begin\{([a-z]{0,9}matrix)\}.*?\\end\{\1\}", re.DOTALL)
_JOINING_ENDS = re.compile(r"^(?:[ \t=+*/^,:&_)\]}<>]|\.(?![0-9]))+")
# Between the parts of a list: "2 and 3", "1, 2".
_JOINT = re.compile(r"[0-9)\]}$](\s*,?\s*\b(?:and|or)\s*|,\s*)$")
_FUNCTIONS = frozenset(("sqrt", "sin", "cos", "tan", "log", "ln", "exp", "pi", "frac"))
_CURRENCIES = frozenset(["usd", "eur", "gbp", "inr", "rs", "us", "rm"])
_ORDINALS = frozenset(["st", "nd", "rd", "th"])
# Behind these words an equation is whole: what precedes them is no part of it.
_LEAD = re.compile(
    "so|thus|hence|therefore|then|is|are|be|gets?|have|that|and|since|because|obtain|where|with", re.IGNORECASE
)
_OPENING, _CLOSING, _ENDS = "([{", ")]}", " \t=+*/^,:.&_"

_CUE = re.compile(r"\b(?:is|are|equals|equal to|be|was|were)\b[:\s]*|[A-Za-z]:\s+|=")
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)|,\s+(?:not|which|since|because|as|so|but)\b|\s+(?:because|since)\b|\n")
_NEGATION = re.compile(r"\b(?:not|never|no|except|but|cannot|without)\b|n't\b", re.IGNORECASE)
_UNDECIDED = re.compile(
    r"\b(?:or|maybe|perhaps|possibly)\b"
    r"|\b(?:(?:[a-z]+er|less|more) than|at (?:least|most)|up to)\W{0,3}[0-9]",
    re.IGNORECASE,
)
# "... is not 7": the expression behind it is what the answer is not.
_DENIAL = re.compile(
    r"(?:\b(?:not|cannot|never|neither)|n't)(?: be| equals?| equal to| exactly| simply)?"
    r"(?:\\[a-z]+|[^A-Za-z.?!;]|\.(?=[0-9]))*$",
    re.IGNORECASE,
)
_BESIDE = re.compile(r"[0-9})\]](?:\s*\$)?(\s*,?\s*\bor(?: maybe| perhaps)?\s*\$?\s*)$", re.IGNORECASE)
_MAX_DENIAL_CHARS, _MAX_BEHIND_CHARS = 80, 2000
# "17 is rejected", "reject 17": what stands there is no answer; one may stand before.
_REJECTED = (
    r"(?:rejected|discarded|extraneous|invalid|inadmissible|impossible|ruled out|excluded|dismissed|wrong|incorrect"
    r"|false|spurious|too (?:large|small|big|high|low|many|few)|the wrong"
    r"|not (?:right|correct|valid|possible|allowed|acceptable|a (?:valid |real )?(?:solution|root|answer)"
    r"|(?:the|my) (?:right |correct |final |real )?answer|in (?:the|its) (?:domain|range)))"
)
_REJECTION = re.compile(
    rf"\b(?:is|are|was|were|be|being|as|it's|that's)\s+(?:therefore |thus |clearly |also |an? )*{_REJECTED}\b"
    r"|(?:\(|\{)\s*(?:rejected|extraneous|invalid|discarded|not valid|wrong)\b"
    r"|\b(?:isn't|aren't|wasn't|is not|are not) (?:right|correct|valid|possible|allowed|acceptable|it|an? solution"
    r"|a root|an answer|the (?:right |correct |final )?answer)\b"
    r"|\b(?:does not|doesn't|do not|don't|cannot|can't|fails to|won't) (?:work|satisfy|fit|hold|be|count|check|apply)\b"
    r"|^\s*not\b|\bfails?\b|(?<![0-9.=+*/^<-])\s*\b([0-9]+(?:\.[0-9]+)?)\s*=\s*\1(?!\s*[0-9.]*[0-9=+*/^-])"
    r"|\b(?:reject|discard|dismiss|exclud|disregard)(?:e?s|ed|ing|e)?\b|\b(?:rule|ruling|throw) out\b|\bignore\b",
    re.IGNORECASE,
)
_SENTENCE_START = re.compile(
    r"[.;!?](?=\s)|\n|,\s+(?=(?:not|and|but|so|while|whereas|since|as) )|(?<=\s)\((?=[A-Za-z0-9$])"
)
# "\\boxed{41} is wrong", "... That is not right."
_DENIES = re.compile(
    r"(?:\s|[$*.,:;()\]}\"']|\\[\])]|</answer>)*(?:(?:it|that|this|which|but (?:it|that|this))\s+)?"
    rf"(?:(?:is|was|seems|looks|must be)\s+(?:of course |clearly |actually )?{_REJECTED}\b"
    rf"|\(\s*{_REJECTED}\b|isn't (?:right|correct|it|the answer)\b|(?:cannot|can't) be (?:right|correct|true|it)\b"
    r"|does(?: not|n't) (?:work|fit|satisfy)\b"
    r"|but (?:it|that|this) (?:is|was) (?:negative|not|too|outside|out of|no)\b|\?)",
    re.IGNORECASE,
)
# "... or 43", "Wait, it is 43": another value is named behind the answer.
_OR = re.compile(
    r"(?:\s|[$*.,:;(]|\\[\])]|</answer>)*(?:\\text\s*\{\s*)?"
    r"(?:/|(?:or|else|maybe|perhaps|possibly|alternatively|otherwise|but (?:it )?(?:could|might|may)"
    r"|(?:it )?(?:could|might|may) also)\b)"
    r"(?:[\s,:}*]|\b(?:else|it is|it's|it could be|be|even|maybe|perhaps|possibly|also|rather)\b|\b[a-z]\s*=)*"
    r"(?=[-+$.(\[{\\]*[0-9]|[$(]*\\(?:[dt]?frac|sqrt|boxed|pi))",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|scratch that|correction|sorry|oops|hold on|hmm|on second thoughts?"
    r"|i made (?:a mistake|an error)|let me (?:redo|recompute|reconsider|correct|fix)|just kidding|strike that|my bad"
    r"|or rather|i mean)\b"
    r"|(?:^[\s$.,]*|[.!?\n]\s*)no[,.:! ]",
    re.IGNORECASE,
)
_VALUE = (
    r"(?:\$|\\\(|\\\[|\*\*)*\s*(?:[-+$.]*[0-9]|\\(?:[dt]?frac|sqrt|boxed|pi|text)|[(\[{]\s*[-0-9\\]"
    r"|\(?[A-J]\)?(?=[\s.*$)]|$))"
)
_CHECKING = re.compile(r"\b(?:check|verify|confirm|test)[a-z]* (?:our|the|this|my|that) $", re.IGNORECASE)
_STATED = re.compile(
    r"\banswer\b(?: to [^.:\n]{1,60}?)?[*_\s]*"
    r"(?:(?:is|should be|must be|would be|becomes)(?: therefore| thus| then| now| actually)?\b|=|:)"
    rf"[*_:\s]*(?P<value>{_VALUE}[^\n]{{0,200}}?)(?=[.;!?]*(?:\s*$|\n)|[.;!?]\s|,\s)",
    re.IGNORECASE,
)
_SAID = re.compile(
    r"\b(?:answer|result|solution)\b[^.:\n=]{0,60}?(?:\b(?:is|are|was|equals|becomes|(?:should|must|would) be)\b|=|:)",
    re.IGNORECASE,
)
_HEDGES = re.compile(r"(?:approximately|about|therefore|exactly|simply|just|equal to|given by|the number|option)\s+|:")


def final_expression(text: str) -> str | None:
    """The last expression of ``text`` that holds a number, or None. Linear time, whatever the text.

    None, too, when the text denies it: "the answer is not 7".
    """
    tail = text[-MAX_UNICODE_TAIL_CHARS:]
    if not tail.isascii():
        tail = plain_unicode(tail)
        text = tail if re.search("[0-9]", tail) else text
    text, last_digit = _without_rejected(text)
    if last_digit < 0:
        return None
    line, place = _line_around(text, last_digit)
    if _DENIAL.search(line[max(0, place - _MAX_DENIAL_CHARS) : place + 1]):
        return None
    alone = _ALONE.search(line, max(0, place - MAX_NUMBER_CHARS))
    if alone is not None and alone.end(1) == place + 1:
        return alone[1]
    matrix = next((match for match in _MATRIX.finditer(line) if match.start() < place < match.end()), None)
    if matrix is not None:
        return matrix.group()
    span = next((match for match in _SPAN.finditer(line) if match.start() < place < match.end()), None)
    if span is not None and _is_math(content := next(group for group in span.groups() if group is not None)):
        before, behind = line[: span.start()].rstrip(), line[span.end() :].lstrip()
        if _JOINT.search(before):
            return _run(_SPAN.sub(_content_of_span, line))
        if before[-1:] == "-" and not before[:-1].rstrip()[-1:].isalnum():
            content = f"-{content}"
            before = before[:-1].rstrip()
        if before[-1:] not in tuple("=+-*/^)]}0123456789") and behind[:1] not in tuple("=+-*/^"):
            return content.strip() + _behind(behind, is_apart=True)
    return _run(_SPAN.sub(_content_of_span, line))


def stated_value(text: str) -> str | None:
    """The value of the last "the answer is ..." of ``text``, or None."""
    tail = text[-_MAX_BEHIND_CHARS:].strip()
    found = [match for match in _STATED.finditer(tail) if not _CHECKING.search(tail, 0, match.start())]
    return found[-1]["value"].strip() if found else None


def states_value(text: str) -> bool:
    """Return whether the last number of ``text`` stands in "the answer is ..."."""
    tail = text[-_MAX_BEHIND_CHARS:]
    last_digit = max(tail.rfind(digit) for digit in "0123456789")
    sentence = _SENTENCE_END.split(tail[: last_digit + 1])[-1]
    return _SAID.search(sentence) is not None


def other_value(behind: str) -> str | None:
    """The value that ``behind`` puts in the place of the answer before it, or beside it ("or 43"), or None."""
    behind = behind[:_MAX_BEHIND_CHARS]
    if _OR.match(behind):
        return final_expression(_SENTENCE_END.split(behind.lstrip(" \n$*.,:;"), maxsplit=1)[0])
    taken_back = _TAKEN_BACK.search(behind)
    return None if taken_back is None else final_expression(behind[taken_back.end() :])


def is_denied(before: str) -> bool:
    """Return whether the text in front of an answer says that it is not the answer."""
    line = re.sub(r"<answer>\s*$", "", before[-_MAX_DENIAL_CHARS:]).rpartition("\n")[2]
    return _DENIAL.search(line) is not None


def value_beside(before: str) -> str | None:
    """The value that the text in front of an answer names beside it ("41 or"), or None."""
    if "or" not in before[-40:].lower():
        return None
    before = re.sub(r"<answer>\s*$", "", before[-MAX_LINE_CHARS:])
    beside = _BESIDE.search(before, max(0, len(before) - _MAX_DENIAL_CHARS))
    return None if beside is None else final_expression(before[: beside.start(1)])


def denies(behind: str) -> bool:
    """Return whether the text behind an answer begins with saying that it is wrong."""
    return _DENIES.match(behind[:_MAX_BEHIND_CHARS]) is not None


def stated_answer(text: str) -> str | None:
    """Return what a short answer states, 42 of "The answer is 42." or "42 apples are left"; None when unclear."""
    if len(text) > MAX_SENTENCE_CHARS or not re.search(r"[A-Za-z]{2,}[\s:]", text):
        return None
    text = plain_unicode(text)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    cues = list(_CUE.finditer(text))
    if cues:
        rest = text[cues[-1].end() :]
        if _NEGATION.search(re.split(r"[.,;!?]\s", text[: cues[-1].start()])[-1]):
            return None
        end = _SENTENCE_END.search(rest)
        rest = rest if end is None else rest[: end.start()]
        return _HEDGES.sub("", rest.strip().strip("*").strip(), count=1).strip() or None
    if _NEGATION.search(text) or _UNDECIDED.search(text):
        return None
    numbers = [token for token in _TOKEN.findall(text) if token[0].isdigit()]
    return final_expression(text) if len(numbers) == 1 else None


def _without_rejected(text: str) -> tuple[str, int]:
    """``text`` without the sentences at its end that reject the values in them, and the place of its last digit."""
    for _ in range(4):
        last_digit = max(text.rfind(digit) for digit in "0123456789")
        start = max(0, last_digit - MAX_LINE_CHARS)
        before = list(_SENTENCE_START.finditer(text, start, max(last_digit, 0)))
        behind = _SENTENCE_START.search(text, last_digit + 1, last_digit + MAX_LINE_CHARS)
        first = before[-1].end() if before else start
        sentence = text[first : behind.start() if behind is not None else last_digit + MAX_LINE_CHARS]
        is_rejected = _REJECTION.search(sentence) is not None or denies(text[last_digit + 1 :])
        if last_digit < 0 or not is_rejected:
            return text, last_digit
        text = text[:first]
    return "", -1


def _line_around(text: str, place: int) -> tuple[str, int]:
    """The end of the line (or of the displayed formula over several lines) around ``place``, and its place there."""
    start = max(0, place - MAX_LINE_CHARS)
    before, behind = text[start:place], text[place : place + MAX_LINE_CHARS]
    opening = max(before.rfind("\\["), before.rfind("$$"))
    is_displayed = opening >= 0 and not re.search(r"\\\]|\$\$", before[opening + 2 :])
    cut = opening if is_displayed else before.rfind("\n") + 1
    if not is_displayed:
        behind = behind.partition("\n")[0]
    return before[cut:] + behind, len(before) - cut


def _is_math(content: str) -> bool:
    return not _PROSE_WORD.search(re.sub(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}", "", content))


def _content_of_span(match: re.Match[str]) -> str:
    content = next(group for group in match.groups() if group is not None)
    return content if _is_math(content) else match.group()


def _run(line: str) -> str | None:
    """The whole expression around the last number of ``line``, or the list that ends with it."""
    tokens = [match.group() for match in _TOKEN.finditer(line)]
    found: list[str] = []
    end = len(tokens)
    while len(found) < MAX_PARTS and (span := _last_run(tokens, end)) is not None:
        first, end_of_run = span
        if found and end_of_run < end and "".join(tokens[end_of_run:end]).strip():
            break
        before = next((token for token in reversed(tokens[:first]) if not token.isspace()), "")
        run = "".join(tokens[first:end_of_run])
        behind = "".join(tokens[end_of_run : end_of_run + 12]) if not found else ""
        expression = _trimmed(run, before)
        found.insert(0, expression + _behind(behind, run[-1:].isspace()))
        joint = _JOINT.search("".join(tokens[:first]))
        is_last = len(found) > 1 or not behind.strip(" .*!")
        if joint is None or not expression or not (is_last or joint[1].strip(" ,")):
            break
        end = _token_at(tokens, joint.start(1))
    return ", ".join(found) or None


def _token_at(tokens: list[str], place: int) -> int:
    length = 0
    for i, token in enumerate(tokens):
        if length >= place:
            return i
        length += len(token)
    return len(tokens)


def _last_run(tokens: list[str], end: int) -> tuple[int, int] | None:
    """First token and end of the expression around the last number before ``end`` that is not part of a word."""
    for last in range(end - 1, -1, -1):
        if not tokens[last][-1].isdigit() or (last and _is_identifier(tokens[last - 1])):
            continue
        words = "".join(tokens[max(0, last - 6) : last])
        if _MODULUS.search(words):
            continue
        if _IN_PARTS.search(words):
            return None
        if len(tokens[last]) > MAX_NUMBER_CHARS:
            return None
        first, end_of_run = _widened(tokens, last)
        while first > 0 and _continues(tokens, first - 1):
            first -= 1
        while end_of_run < end and _continues(tokens, end_of_run):
            end_of_run += 1
        # The exponent or index of a word is no answer (cm^2), what an equals sign puts behind it may be.
        run = "".join(tokens[first:end_of_run])
        if not run.lstrip().startswith(("^", "_")):
            return first, end_of_run
        power = re.match(r"\s*[\^_]\s*(?:\{[^{}]*\}|[0-9]+)\s*=\s*(?=.*[0-9])", run)
        if power is not None:
            return first + _token_at(tokens[first:], power.end()), end_of_run
    return None


def _is_identifier(token: str) -> bool:
    return token.isascii() and token.isalpha() and token.lower() not in _CURRENCIES and token not in _FUNCTIONS


def _widened(tokens: list[str], last: int) -> tuple[int, int]:
    """The first token and the end of the brackets around a number, as long as they hold no prose."""
    first, end = last, last + 1
    for opening in reversed(_open_brackets(tokens, last)):
        closing = _closing_bracket(tokens, opening)
        if closing is None or any(not _is_mathematical(token) for token in tokens[opening:closing]):
            break
        first, end = opening, closing + 1
    return first, end


def _open_brackets(tokens: list[str], place: int) -> list[int]:
    stack: list[int] = []
    for i, token in enumerate(tokens[:place]):
        if token.removeprefix("\\") in tuple(_OPENING):
            stack.append(i)
        elif token.removeprefix("\\") in tuple(_CLOSING) and stack:
            stack.pop()
    return stack


def _closing_bracket(tokens: list[str], opening: int) -> int | None:
    depth = 0
    for i in range(opening, len(tokens)):
        bare = tokens[i].removeprefix("\\")
        depth += (bare in tuple(_OPENING)) - (bare in tuple(_CLOSING))
        if depth == 0:
            return i
    return None


def _is_mathematical(token: str) -> bool:
    if token[0] == "\\":
        return not _BREAKING_COMMANDS.fullmatch(token)
    if not token.isascii():
        return False
    if token.isalpha():
        return len(token) == 1 or token in _FUNCTIONS
    return token not in ("#", "<<", ">>", "=>", "->", "?", ";", '"', "`", "**", "\n", "@", "&")


def _continues(tokens: list[str], place: int) -> bool:
    """Return whether the token belongs to the expression beside it."""
    token, following = tokens[place], tokens[place + 1] if place + 1 < len(tokens) else ""
    previous = tokens[place - 1] if place else ""
    if token.isalpha() and len(token) > 1 and previous[:1].isdigit() and token not in _FUNCTIONS:
        return token.lower() not in _ORDINALS  # 42km, 0xff
    if token.isalpha() and previous == "'":  # it's
        return False
    if token == "**":
        return previous[-1:].isalnum() and following[:1].isalnum()
    if token == ";" or (token == "'" and following.isalpha()):
        return token == ";" and bool(following.strip())
    if token in ("a", "A", "I") and (previous.isspace() or not previous) and (following.isspace() or not following):
        return False
    if token in ".,:!" and (not following or following.isspace() or following in "*_"):
        return False
    if token == ":" and not previous[:1].isdigit():
        return False
    return _is_mathematical(token)


def _trimmed(run: str, before: str) -> str:
    """Without operators that join the run to the prose around it; then the right-hand side alone counts."""
    whole = run.strip(" \t*_`")
    run = _JOINING_ENDS.sub("", whole).rstrip(_ENDS + "([{<>-")
    run = re.sub(r"^(?:[xX]|-)\s+(?=[$0-9])", "", run).strip()
    is_cut = len(run) < len(whole.rstrip(_ENDS + "([{<>-"))
    left, equals, right = run.rpartition("=")
    if not equals or left[-1:] in "<>!":
        return run
    is_whole = not before or before in "\n.,:;$?!" or _LEAD.fullmatch(before)
    if is_cut or (is_constant(re.sub(r"[$,%]|\\\$", "", left.replace("=", ""))) and not is_whole):
        return right.strip()
    return run


def _behind(text: str, is_apart: bool) -> str:
    """The unit or the factor that ``text`` begins with, which belongs to the number before: " km", " million"."""
    marked = re.match(r"\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?[23]\}?)?", text)
    if marked is not None:
        return marked.group()
    match = re.match(r"(\s*)([A-Za-z]+(?:[ /][A-Za-z]+){0,2})(\^\{?[23]\}?)?", text)
    if match is None or not (match[1] or is_apart):
        return ""
    parts = match[2].split(" ")
    if parts[0].lower() in FACTORS:
        return f" {parts[0]}"
    for size in range(len(parts), 0, -1):
        words = " ".join(parts[:size]) + (match[3] or "" if size == len(parts) else "")
        if is_measure(words):
            return f" {words}"
    return ""
