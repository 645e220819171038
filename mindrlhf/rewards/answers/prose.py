"""Answers in running text: what "the answer is ..." states, in any language of ``marks``, and the last expression.

``so it is \\frac{3}{4}.`` answers ``\\frac{3}{4}``, never 4; ``2x = 10`` answers the equation, never 10; ``6 * 7 = 42``
answers 42. A number that its sentence does not conclude with ("see Fig. 5") is none. Only the end of the text is looked
at.
"""

import re
from typing import NamedTuple

from mindrlhf.rewards.answers.forms import is_constant
from mindrlhf.rewards.answers.marks import pattern
from mindrlhf.rewards.answers.numeric import MAX_NUMBER_CHARS
from mindrlhf.rewards.answers.spelling import plain_unicode
from mindrlhf.rewards.answers.units import FACTORS, is_measure

# A final expression and what stands around it on its line.
MAX_LINE_CHARS = 500
MAX_UNICODE_TAIL_CHARS, MAX_SENTENCE_CHARS = 2000, 1000
_MAX_DENIAL_CHARS, _MAX_BEHIND_CHARS = 80, 2000

_SPAN = re.compile(
    r"\$\$(.+?)\$\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|(?<![\\$])\$(?! )([^$\n]+?)(?<![ \\])\$(?![0-9])", re.DOTALL
)
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
_NUMBER = r"(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)"
_FUNCTIONS = "sqrt|sin|cos|tan|log|ln|exp|pi"
_TOKEN = (
    r"(?:\\(?!(?:text[a-z]*|q?quad|implies|[Rr]ightarrow|therefore|item|begin|end|newline|so|to|Longrightarrow)"
    rf"(?![A-Za-z]))[A-Za-z]+[0-9]*|\\[^A-Za-z\\]|(?<![A-Za-z]){_NUMBER}(?:(?<=[0-9])(?!st|nd|rd|th)[A-Za-z]+)?"
    rf"|(?<![A-Za-z])(?:{_FUNCTIONS})(?![A-Za-z])"
    r"|(?<![A-Za-z'])(?![aAI](?:\s|$))[A-Za-z](?![A-Za-z]|'[a-z])|(?<=\w)\*\*(?=\w)|(?<!\*)\*(?!\*)|(?<!<)<(?!<)|(?<![>=-])>(?!>)"
    r"|[-+/^_=()\[\]{}|%$'\u00b0](?!>)|[.,:;!](?=[^\s*_.,:;!])|!(?=\s*[=/*+-])"
    r"|(?<=[0-9)\]}$])\s*(?:[,;]\s|,?\s*\b(?:and|or)\b)\s*(?=[-+$\\(\[{]*[0-9]|[a-z]\s*=|\\[({\[]))"
)
_RUN = re.compile(rf"{_TOKEN}(?:\s*{_TOKEN})*")
_MODULUS = re.compile(r"\bmod[\s{]*$")
_IN_PARTS = re.compile(r"[0-9]\s+(?:in|out of)\s+$")
_MATRIX = re.compile(r"\\begin\{([a-z]{0,9}matrix)\}.*?\\end\{\1\}", re.DOTALL)
_JOINING_ENDS = re.compile(r"^(?:[ \t=+*/^,:&_)\]}<>]|\.(?![0-9]))+")
# Behind these words an equation is whole: what precedes them is no part of it.
_LEAD = re.compile(
    "so|thus|hence|therefore|then|is|are|be|gets?|have|that|and|since|because|obtain|where|with", re.IGNORECASE
)
_REFERENCE = re.compile(r"\b(?:fig|eqs?|no|pp?|ch|sec|ex|thm|prop|tab|vol|nr|abb|cf|see)\.\s*$|[a-z]{2}://", re.I)
_LEFT = re.compile(r"^\D{0,40}\b(?:left|remain\w*|in total|altogether|in all)\b", re.IGNORECASE)
_ENDS = " \t=+*/^,:.&_"

_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)|,\s+(?:not|which|since|because|as|so|but)\b|\s+(?:because|since)\b|\n")
_UNDECIDED = re.compile(
    r"\b(?:and|or|maybe|perhaps|possibly|alternatively|could be|might be)\b|\b(?:if|when)\b.*\b(?:if|otherwise|else)\b"
    r"|\b(?:(?:[a-z]+er|less|more) than|at (?:least|most)|up to)\W{0,3}[0-9]",
    re.IGNORECASE,
)
# "... is not 7", "my friend says 7", "my old answer was 7": the expression behind it is what the answer is not.
_DENIAL = (
    r"(?:<denies>(?: be| equals?| equal to| exactly| simply| quite|\s*<equals>)?|<others>(?:'s <answer>| (?:would )?"
    r"(?:sa[iy]|claim|think|believe)\w*)(?: that)?(?:,? (?:it|the|[a-z]))?(?: <answer>)?(?:'s| is| was)?)"
    r"(?:\\[a-z]+|[^\w.?!;]|\.(?=[0-9])|[0-9_])*$"
)
_RATHER = r"<denies>\s[^.!?\n]{0,40}?[0-9][^.!?\n]{0,10}?[\s,]*<rather>\s+(?=[-$\\(]*[0-9])"
# Behind it in Japanese and Korean.
_DENIED_BEHIND = r"^[\s$}*)\]]*(?:[^\W\d_]\s*)?(?=[^\x00-\u0fff])<denies>"
_REJECTED_LATER = (
    r"\b(?:it|this|that|which)(?:'s| is)?\s+(?:\w+\s+){0,2}(?:<rejects>|wrong|false)|\bit's wrong\b|\bno solution\b"
    r"|\b(?:kidding|joking|contradict\w*)\b|\b(?:one|some) of (?:them|these)\b|(?=[^\x00-\u0fff])<rejects>"
)
# "41 or", "41 if n is even, otherwise"
_BESIDE = (
    r"[0-9})\]](?:\s*\$)?(?=\s*,?\s*<joins>\s*\$?\s*[-\u2212]?$"
    r"|[,;]?(?: and| or)? (?:if|for (?:even|odd))\b[^.!?\n]+?(?:[,;]|\band|\botherwise|\belse|(?<!so )\bit is)[\s$]*$)"
)
# "17 is rejected", "reject 17": what stands there is no answer; one may stand before.
_REJECTION = (
    r"(?:\b(?:is|are|was|were|be|being|as|it's|that's)|<equals>)\s*(?:therefore |thus |clearly |also |an? )*<wrong>"
    r"|[({]\s*<wrong>|\b(?:isn't|aren't|wasn't|is not|are not) (?:right|correct|valid|possible|allowed|acceptable|it"
    r"|an? solution|a root|an answer|the (?:right |correct |final )?answer)\b"
    r"|\b(?:does not|doesn't|do not|don't|cannot|can't|fails to|won't) (?:work|satisfy|fit|hold|be|count|check|apply)\b"
    r"|^\s*not\b|\bfails?\b|(?<![0-9.=+*/^<-])\s*\b([0-9]+(?:\.[0-9]+)?)\s*=\s*\1(?!\s*[0-9.]*[0-9=+*/^-])"
    r"|\b(?:reject|discard|dismiss|exclud|disregard)(?:e?s|ed|ing|e)?\b|\b(?:rule|ruling|throw) out\b|\bignore\b"
)
_SENTENCE_START = re.compile(
    r"[.;!?](?=\s)|\n|,\s+(?=(?:not|and|but|so|while|whereas|since|as) )|\((?<=\s.)(?=[A-Za-z0-9$])"
)
# "\\boxed{41} is wrong", "... That is not right."
_DENIES = (
    r"(?:\s|[$*.,:;()\]}\"']|\\[\])]|</answer>)*(?:(?:it|that|this|which|but (?:it|that|this))\s+)?"
    r"(?:(?:is|was|seems|looks|must be|would be)\s+(?:of course |clearly |actually )?<wrong>|\(\s*<wrong>"
    r"|(?:is|was) (?:what )?<others>(?:'s|\W+(?:say|said|claim|think))|(?:says?|according to) <others>|or so they say\b"
    r"|isn't (?:right|correct|it|the answer)\b|(?:cannot|can't) be(?: (?:right|correct|true|it)\b|\.)"
    r"|does(?: not|n't) (?:work|fit|satisfy)\b"
    r"|(?:(?:al)?though |but )?I (?:disagree|(?:do not|don't) (?:agree|believe it))\b"
    r"|but (?:it|that|this) (?:is|was) (?:negative|not|too|outside|out of|no)\b|\?)"
)
# "... or 43", "Wait, it is 43": another value is named behind the answer.
_OR = (
    r"(?:\s|[$*.,:;(\"']|\\[\])]|</answer>)*(?:\\text\s*\{\s*)?"
    r"(?:/|otherwise\b|but (?:it )?(?:could|might|may)\b|(?:it )?(?:could|might|may) also\b|<joins>"
    r"|(?:but|(?:al)?though)(?=\s[0-9.]+\$? (?:is|seems) (?:better|right|correct)))"
    r"(?:[\s,:}*]|\b(?:else|it is|it's|it could be|be|even|maybe|perhaps|possibly|also|rather|n is \w+)\b|\b[a-z]\s*=)*"
    r"(?=[-+$.(\[{\\]*[0-9]|[$(]*\\(?:[dt]?frac|sqrt|boxed|pi))"
    r"|[\s$})]*,? (?:if|when|for (?:even|odd))\b[^.!?\n]{0,60}?\s(?:(?:and|otherwise|else),? (?:it is )?[$\\a-z{]*[0-9]"
    r"|[$\\a-z{]*[0-9.]+[$}]*,? (?:if|when|otherwise|else|for)\b)"
)
_TAKEN_BACK = r"<takes_back>|(?:^[\s$.,]*|[.!?\n]\s*)no[,.:! ]"
# Where the value of "the answer is ..." begins, and where it ends.
_STATED = (
    r"(?<![<>/\w])<answer>(?P<gap>[^\n.:;!?=0-9$\\()]{0,30}?)(?:(?:(?<=[\s*_\"'])|(?=[^\x00-\u0fff]))(?:<equals>)(?:\s*:)?"
    r"|[*_\"'\s]*[:=]|(?P<heading>[*_: ]*\n))(?:[\s*_:\"']|<concludes>(?=\s))*"
)
_ARTICLE = re.compile(r"(?:the|an?|that) ", re.IGNORECASE)
_HEADING = re.compile(r"(?:[#*_\s]|the|final|my)*$", re.IGNORECASE)
_VALUE_END = (
    r"[.!?](?=\s|$|\*)|\n|;(?=\s+[^\W\d_]{2})|,\s+(?=<because|denies>)|,\s+(?!<joins>)(?=[^\W\d_]{3})|\s+(?=<because>)"
    r"|\s+[-\u2013\u2014]+\s+(?=[^\W\d_]{2})|</|<\||,\s*(?=\")"
)
_ANNOTATION = re.compile(
    r"(?<=[\w$}\])*])(?<!\\cup)(?<!\\cap)\s+(?:\[[0-9]{1,2}\]"
    r"|[(\[](?!mod|base|in |hex|bin|oct|of )[^()\[\]]*[^\W\d_]{2}[^()\[\]]*[)\]])$",
    re.IGNORECASE,
)
_CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")  # before its result, as in GSM8K's solutions
_NEXT_SENTENCE = re.compile(r"(?<=[0-9)}\]$*])\s+([A-Z][a-z]+)(?=:|\s.*[0-9])", re.DOTALL)
# What is done with the answer, or another noun: "to express the answer as a percentage: 9 / 27 = 33.3%".
_NO_MARK = re.compile(
    r"\b(?:(?:check|verify|confirm|test|express|round)[a-z]* (?:our|the|this|my|that) |had |short[ -]"
    r"|(?:first|second|third|fourth|fifth|next|previous|old|earlier|(?:friend|teacher|student|colleague)s?'s?) )$",
    re.IGNORECASE,
)
_MARKS = re.compile(r"\\(?:boxed|fbox|framebox)|####|<answer>")
# A clause begins behind these; what rejects an answer stands in its clause.
_CLAUSE = re.compile(
    r"[.;!?:](?=\s)|,(?=\s)(?!\s(?:that|que|dass|что)\b)|\n|\b(?:so|thus|hence|therefore|but|instead)\b", re.IGNORECASE
)
_HEDGES = re.compile(r"(?:approximately|about|therefore|exactly|simply|just|equal to|given by|the number|option)\s+|:")


class Mark(NamedTuple):
    """A marked answer: where it begins and ends with its marks; ``content`` is None in a box that is not closed."""

    start: int
    end: int
    content: str | None


def stated_answers(text: str) -> list[Mark]:
    """Marks of what ``text`` says to be the answer, the result or the solution, near its end; none that it denies."""
    offset = max(0, len(text) - _MAX_BEHIND_CHARS)
    tail = text[offset:]
    matches = [match for match in pattern(_STATED).finditer(tail) if not _NO_MARK.search(tail, 0, match.start())]
    marks = []
    for i, match in enumerate(matches):
        line = tail[: match.start()].rpartition("\n")[2]
        if match["heading"] is not None and not _HEADING.match(line):
            continue
        stop = matches[i + 1].start() if i + 1 < len(matches) else len(tail)
        end = pattern(_VALUE_END).search(tail, match.end(), stop)
        end = stop if end is None else end.start()
        value, gap = tail[match.end() : end], tail[match.end("gap") - len(match["gap"]) : match.end()]
        if stop == end:  # "41 and the answer is 42"
            value = pattern(r"[\s,]*<joins>?\s*(?:the)?\s*$").sub("", value)
        if _MARKS.search(value):
            continue
        sentence = _NEXT_SENTENCE.search(value)
        if sentence is not None and not is_measure(sentence[1]) and sentence[1].lower() not in FACTORS:
            value = value[: sentence.start()]
        content = _undenied(gap, _bare_value(value))
        is_worded = content is not None and re.search(r"[^\W\d_]{2}", content) and not re.search(r"[0-9\\]", content)
        if not content or is_rejected(tail[: match.end()]):
            continue
        if is_worded and (len(content.split()) > 4 or _ARTICLE.match(value) or re.search("[0-9]", tail[end:])):
            continue
        marks.append(Mark(offset + match.start(), offset + match.end() + len(value.rstrip()), content))
    return marks


def _bare_value(value: str) -> str:
    value = re.sub(r"\b([0-9.]+) \(\1\)$", r"\1", value)
    value = pattern(r"\s*<ends>[\s.]*$").sub("", _CALCULATION.sub("", value).strip())
    note = _ANNOTATION.search(value)
    if note is not None and not (_UNDECIDED.search(note[0]) or pattern("<wrong>").search(note[0])):
        value = value[: note.start()]
    braces = "}" if value.count("{") < value.count("}") else ""
    value = value.strip(f"*_\"' \t{braces}")
    hedge = _HEDGES.match(value)
    return value if hedge is None else value[hedge.end() :]


def _undenied(gap: str, value: str) -> str | None:
    """``value``, or what "not 41 but 42" says in its stead; None where it is denied."""
    denied = pattern(r"<denies>(?!\s*(?:defined|exist|possible|real|enough))")
    if not denied.search(gap) and (not denied.search(value) or denied.fullmatch(value)):
        return value
    *before, last = pattern(r"[\s,]*<rather>\s*").split(value)
    return last if before and not denied.search(last) else None


def is_rejected(before: str) -> bool:
    """Return whether the clause at the end of ``before`` supposes, guesses or rejects what follows it."""
    sentence = _SENTENCE_START.split(before[-300:].rstrip("*_:$ \t([{\\"))[-1]
    if pattern("<rejects|supposes>").search(sentence) is None:
        return False
    rejects = pattern("<rejects>").search(_CLAUSE.split(sentence)[-1])
    return rejects is not None or pattern("<supposes>").search(sentence) is not None


def final_expression(text: str, is_named: bool = False) -> str | None:
    """The last expression of ``text`` that holds a number, or None. Linear time, whatever the text.

    None, too, when the text denies it ("the answer is not 7") or does not conclude with it ("see Fig. 7"), but where
    ``is_named`` says that any value counts.
    """
    tail = text[-MAX_UNICODE_TAIL_CHARS:]
    if not tail.isascii():
        tail = plain_unicode(tail)
        text = tail if re.search("[0-9]", tail) else text
    text, last_digit = _without_rejected(text[: -len(tail)] + pattern(_RATHER).sub("is ", tail))
    if last_digit < 0:
        return None
    line, place = _line_around(text, last_digit)
    before, behind = line[:place], line[place + 1 :]
    if pattern(_DENIAL).search(line[max(0, place - _MAX_DENIAL_CHARS) : place + 1]) or denies(behind):
        return None
    is_conclusion = _concludes(_SENTENCE_END.split(before)[-1], behind) and not _REFERENCE.search(before)
    if not is_named and (is_rejected(before) or not is_conclusion):
        return None
    matrix = next((match for match in _MATRIX.finditer(line) if match.start() < place < match.end()), None)
    if matrix is not None:
        return matrix.group()
    span = next((match for match in _SPAN.finditer(line) if match.start() < place < match.end()), None)
    if span is not None and _is_math(content := next(group for group in span.groups() if group is not None)):
        before, behind = line[: span.start()].rstrip(), line[span.end() :].lstrip()
        is_list = pattern(r"[0-9)\]}$]\s*(?:,|,?\s*<joins>)$").search(before)
        if before[-1:] == "-" and not before[:-1].rstrip()[-1:].isalnum():
            content = f"-{content}"
            before = before[:-1].rstrip()
        if not is_list and before[-1:] not in tuple("=+-*/^)]}0123456789") and behind[:1] not in tuple("=+-*/^"):
            return content.strip() + _behind(behind, is_apart=True)
    return _run(_SPAN.sub(_content_of_span, line))


def _concludes(before: str, behind: str) -> bool:
    """Return whether a number is what its sentence leads to, or all that stands there."""
    if pattern(r"<concludes>|[=:\u2248<>]|\\(?:le|ge|ne|in|approx)(?![A-Za-z])").search(before):
        return True
    if _LEFT.search(behind):
        return True
    words = _PROSE_WORD.findall(re.sub(rf"\\[A-Za-z]+|\b(?:{_FUNCTIONS})\b", "", _HEDGES.sub("", before)))
    return not words and len(_PROSE_WORD.findall(_SENTENCE_END.split(behind)[0])) < 4


def other_value(behind: str) -> str | None:
    """The value that ``behind`` puts in the place of the answer before it, or beside it ("or 43"), or None."""
    behind = behind[:_MAX_BEHIND_CHARS]
    if pattern(_OR).match(behind):
        return final_expression(_SENTENCE_END.split(behind.lstrip(" \n$*.,:;"), maxsplit=1)[0], is_named=True)
    taken_back = pattern(_TAKEN_BACK).search(behind)
    return None if taken_back is None else final_expression(behind[taken_back.end() :], is_named=True)


def is_denied(before: str) -> bool:
    """Return whether the text in front of an answer says that it is not the answer."""
    line = re.sub(r"<answer>\s*$", "", before[-_MAX_DENIAL_CHARS:]).rpartition("\n")[2]
    return pattern(_DENIAL).search(line) is not None or is_rejected(before)


def value_beside(before: str) -> str | None:
    """The value that the text in front of an answer names beside it ("41 or"), or None."""
    before = re.sub(r"<answer>\s*$", "", before[-MAX_LINE_CHARS:])
    beside = pattern(_BESIDE).search(before, max(0, len(before) - _MAX_DENIAL_CHARS))
    return None if beside is None else final_expression(before[: beside.end()], is_named=True)


def denies(behind: str) -> bool:
    """Return whether the sentence that goes on behind an answer says that it is wrong."""
    behind = behind[:_MAX_BEHIND_CHARS]
    if pattern(_DENIES).match(behind) or pattern(_DENIED_BEHIND).match(behind):
        return True
    sentence = re.split(r"[.!?;](?=\s|$)|\n", behind[:300].lstrip(" $*})]"), maxsplit=1)[0]
    clause = pattern(r"(?:^|\s+)(?=<because>)|,\s").split(sentence, maxsplit=1)[0]
    return pattern("<rejects>").search(clause) is not None or pattern(_REJECTED_LATER).search(sentence) is not None


def stated_answer(text: str) -> str | None:
    """Return what a short answer states, 42 of "The answer is 42." or "42 apples are left"; None when unclear."""
    if len(text) > MAX_SENTENCE_CHARS or not re.search(r"[A-Za-z]{2,}[\s:]", text):
        return None
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = pattern(r",\s+(?=<denies>)").split(_ANNOTATION.sub("", text))[0]
    is_open = _UNDECIDED.search(text) or pattern("<denies>|<rejects>").search(text)
    return None if is_open or not pattern("<concludes>|[=:]").search(text) else final_expression(text)


def _without_rejected(text: str) -> tuple[str, int]:
    """``text`` without the sentences at its end that reject the values in them, and the place of its last digit."""
    for _ in range(4):
        last_digit = max(text.rfind(digit) for digit in "0123456789")
        start = max(0, last_digit - MAX_LINE_CHARS)
        before = list(_SENTENCE_START.finditer(text, start, max(last_digit, 0)))
        behind = _SENTENCE_START.search(text, last_digit + 1, last_digit + MAX_LINE_CHARS)
        first = before[-1].end() if before else start
        sentence = text[first : behind.start() if behind is not None else last_digit + MAX_LINE_CHARS]
        is_rejected = pattern(_REJECTION).search(sentence) is not None or denies(text[last_digit + 1 :])
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
    for match in reversed(list(_RUN.finditer(line))):
        run, before, behind = match.group(), line[: match.start()], line[match.end() :]
        power = re.match(r"\s*[\^_]\s*(?:\{[^{}]*\}|[0-9]+)\s*", run)
        if power is not None:  # cm^2 = 5
            run = run[power.end() :] if run[power.end() :].startswith("=") else ""
        if not re.search("[0-9]", run) or _MODULUS.search(before):
            continue
        if _IN_PARTS.search(before) or any(len(part) > MAX_NUMBER_CHARS for part in re.findall(r"[0-9.,]+", run)):
            return None
        run = re.sub(r"\s*,?\s*\b(?:and|or)\b\s*", ", ", run)
        expression = _trimmed(run, next((word for word in reversed(re.findall(r"[^\W\d_]+|\S|\n", before))), ""))
        return _balanced(expression + _behind(behind, run[-1:].isspace() or behind[:1].isspace()))
    return None


def _balanced(text: str) -> str | None:
    """``text`` without the brackets at its ends that have no partner; None when others have none."""
    for opening, closing in ("()", "[]", "{}"):
        bare = text.replace("\\left", "").replace("\\right", "")
        if bare.count(opening) > bare.count(closing) and text.startswith(opening):
            text = text[1:]
        elif bare.count(opening) < bare.count(closing) and text.endswith(closing):
            text = text[:-1]
    return text.strip() or None


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
