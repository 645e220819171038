"""Results told from repetitions of the question: ``14 + 7`` is no answer to "What is 14 + 7?".

Answers are equal by value (``equality``), which cannot tell the two apart: a policy that repeats the question would be
paid. So a question for a number is answered by a number. The grader of PRM800K has the same rule for integers (Lightman
et al. 2023, arXiv:2305.20050).
"""

import re

from mindrlhf.rewards.answers.forms import is_name, read_form, split
from mindrlhf.rewards.answers.numeric import parse_number
from mindrlhf.rewards.answers.spelling import SIMPLE, plain_spelling
from mindrlhf.rewards.answers.units import parse_quantity

# The words on either side of a number that must stand in the prompt as well, for it to be copied.
_NUM_WORDS_BESIDE = 2
_MAX_SPELLED_CHARS, _MAX_TAIL_CHARS = 500, 1000

_EQUALS = re.compile(r"==?|\\(?:approx|sim|equiv)(?![A-Za-z])|:=")
_TIMES = re.compile(r"(?<=[0-9)%])\s*[xX]\s*(?=[0-9(])")
_POWER_OF_TEN = re.compile(r"(?<=[0-9])\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{[-+]?[0-9]+\}|[-+]?[0-9]+)")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*[-+]?[0-9]+\s*\}\s*\{\s*[-+]?[0-9]+\s*\}|[0-9]\s*[0-9])")
_SYMBOLIC_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{[^{}0-9]*\}\s*\{[^{}+*-]*\}|\{[^{}+*-]*\}\s*\{[^{}0-9]*\})")
# What stands above and below a number or letter, and words: operations there are not between the numbers on the line.
_AROUND = re.compile(
    r"(?:\^|\*\*|_)\s*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\([^()]*\)|[-+]?[0-9]+(?:/[0-9]+)?|\\?[A-Za-z]+)"
    r"|\\(?:text[a-z]*|mathrm|mbox)\s*\{[^{}]*\}"
)
_SIGN = r"(?:[-+*/]|\\(?:times|cdot|div|ast)(?![A-Za-z]))"
_CARRIED_OUT = r"\\(?:int|sum|prod|lim|gcd|lcm|max|min|det)(?![A-Za-z])|\\[dt]?frac\s*\{\s*d[\^}\s]"
# Of numbers: 14 + 7, 3(6), (3)(6), 2^3 3^2.
_OPERATION = re.compile(
    rf"(?<=[0-9)\]}}!%])\s*{_SIGN}\s*[-+]?\s*\$?\s*(?=[0-9.(\[{{\\])|(?<=[0-9)])\s*\((?=\s*[-+]?\s*[0-9.])"
    rf"|(?<=[0-9])\s+(?=[0-9])|(?<=[0-9)])\s*\\(?:sqrt|binom|log)(?![A-Za-z])|\\[dt]?frac|{_CARRIED_OUT}"
)
# Of anything: x + 1, 3x + 4x.
_ANY_OPERATION = re.compile(rf"(?<=[0-9A-Za-z)\]}}!%|])\s*{_SIGN}(?=\s*[-+0-9A-Za-z.(\[{{\\|])|{_CARRIED_OUT}")
_VARIABLE = re.compile(
    r"(?<![\\A-Za-z])(?![eixX])[A-Za-z](?![A-Za-z])|(?<![0-9] )(?<![\\A-Za-z])[xX](?![A-Za-z])|[<>]"
    r"|\\(?:le|ge|ne|in|cup)(?![A-Za-z])"
)
_POWER_IN_WORDS = re.compile(r"[0-9]\s*(?:squared|cubed|factorial)\b", re.IGNORECASE)
_FUNCTION = re.compile(
    r"\^|\*\*|!|\||\\(?:sqrt|binom|dbinom|tbinom|choose|log|ln|exp|sin|cos|tan|lfloor|lceil|lvert)(?![A-Za-z])"
    r"|\b(?:sqrt|log|ln|exp|sin|cos|tan)\b"
)
# 14\frac{7}{1} is a sum: the fraction of a mixed number is below 1.
_MIXED = re.compile(
    r"[0-9]\s*(?:\\[dt]?frac\s*\{\s*(?P<top>[0-9]+)\s*\}\s*\{\s*(?P<bottom>[0-9]+)\s*\}"
    r"|\s(?P<plain_top>[0-9]+)\s*/\s*(?P<plain_bottom>[0-9]+))"
)
_LOGARITHM = re.compile(r"\\(?:log|ln|exp)(?![A-Za-z])|\b(?:log|ln|exp)\b")
_POWER = re.compile(r"(?:[0-9]+|(?<![A-Za-z\\])e)\s*\^\s*(?:\{[^{}]*\}|[0-9])")
_ENTRIES = re.compile(r"\\begin\{[a-z]*matrix\}|\\end\{[a-z]*matrix\}|&|\\\\")

_TOKEN = re.compile(r"\\[A-Za-z]+|[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]+|[^\s\w]", re.ASCII)
_LOOKS = re.compile(
    r"\\(?:left|right|big[gl]?|Big[gl]?|displaystyle|[,;:! ])(?![A-Za-z])|\\[()\[\]]|[${}`]|\*\*(?=\s|$)|(?<=\s)\*\*"
)
_SPELLINGS = (
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2 "),
    (re.compile(r"\\[dt]?frac\s*([0-9])\s*([0-9])"), r" \1/\2 "),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|(?<=[0-9)])\s*[xX]\s*(?=[0-9(])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\*\*"), "^"),
)
_JOINED = frozenset("+-*/^=<>_([")
_JOINED_BEHIND = frozenset("+-*/^=<>_)]!")

_WORD = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|[^\W\d_]+")
# Not of a name: mp3.
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_SENTENCE_END = re.compile(r"[.!?;:](?=\s|$)|\n")
# Words beside a number that make it an operand: "so 14 plus 7", "half of 42", "the sum of 14 and 7", "7 squared".
_OPERAND = re.compile(
    r"(?:\b(?:plus|minus|times|over|by|than|from|twice)|(?:half|third|quarter|cent|%|square|root|[0-9]) of"
    r"|\b(?:sum|difference|product|quotient|add|subtract|multiply|divid)\w*\b[^.!?;:=]*[0-9]\s*,?\s*(?:and|by|to))"
    r"\s*(?:the\s+)?\$?[-+]?$",
    re.IGNORECASE,
)
# Of responses that compute or decide.
_CONCLUSION = re.compile(
    r"[0-9)]\s*[-+*/\u00d7\u00f7^]\s*[0-9A-Za-z(\\$]|[A-Za-z]\s*[-+*/^]\s*[0-9]|\\(?:times|cdot|div|frac)"
    r"|\b(?:so|thus|hence|therefore|altogether|total|left|remain\w*|results?|answer|equals?|gives?|gets?|makes?|because"
    r"|since|more|less|most|least|\w+est|larger|smaller|greater|bigger|fewer|higher|lower|longer|shorter|older|younger)\b",
    re.IGNORECASE,
)
_OPERAND_BEHIND = re.compile(
    r"^[\s$*)]*(?:plus|minus|times|squared|cubed|factorial|more than|less than|(?:multipli|divid)ed by)\b"
    r"|^[\s$]*(?:[-+*/\u00d7\u00f7]|\\(?:div|times|cdot))\s*\??$",
    re.IGNORECASE,
)
# "A: 41, B: 42": values to choose from.
_OPTIONS = re.compile(r"(?i:(?:(?<!\w)(?:[a-j]|(?:option|candidate|guess) \w)[:.)]\s*\$?[0-9.,]+[\s$;]*){2,}\Z)")


def is_result(prediction: str, reference: str, prompt: str = "", *, is_marked: bool = True) -> bool:
    """Return whether ``prediction``, which is equal to ``reference``, states a result.

    It does not when it still is to be computed where the reference is a number, or a list, tuple or set of numbers.
    Without a mark it must be a number, not a power, a root or a quotient with an integer value either. And it does not
    when it stands in ``prompt`` and is not the reference itself: ``(x+1)^2`` where that is to be expanded.
    """
    # Plain spelling has a slash for it, as in a fraction.
    prediction = plain_spelling(prediction.replace("\u00f7", "\\div "))
    reference = plain_spelling(reference)
    if prediction == reference and SIMPLE.fullmatch(prediction):
        return True
    if all(parse_quantity(value) is not None for value in _parts(reference)):
        is_integer = (number := parse_number(reference)) is not None and number.value.denominator == 1
        if not all(_has_result(part, is_marked, is_integer) for part in _parts(prediction)):
            return False
    elif not is_marked and len(_ANY_OPERATION.findall(prediction)) > len(_ANY_OPERATION.findall(reference)):
        return False
    return not prompt or not _stands_in(prompt, prediction, reference)


def restates(text: str, prompt: str = "") -> bool:
    """Return whether the last number of ``text``, which marks no answer, is an operand, or copied with its words.

    An operand in words: "14 plus 7", "half of 42". Copied: the words beside it stand in ``prompt`` in the same order.
    """
    tail = text[-_MAX_TAIL_CHARS:]
    numbers = list(_NUMBER.finditer(tail))
    if not numbers or _OPTIONS.search(tail[-99:]):
        return bool(numbers)
    number = numbers[-1].group()
    before, behind = tail[: numbers[-1].start()], tail[numbers[-1].end() :]
    end = _SENTENCE_END.search(behind)
    behind = behind if end is None else behind[: end.start()]
    ends = list(_SENTENCE_END.finditer(before))
    before = before if not ends else before[ends[-1].end() :]
    plain = re.sub(r"\s+", " ", _LOOKS.sub("", before))
    if _is_list_mark(tail, numbers[-1]) or _OPERAND.search(plain) or _OPERAND_BEHIND.search(behind):
        return True
    if not prompt:
        return False
    if _copies_numbers(tail, prompt):
        return True
    words = [*_WORD.findall(before)[-_NUM_WORDS_BESIDE:], number, *_WORD.findall(behind)[:_NUM_WORDS_BESIDE]]
    copied = f" {' '.join(words)} ".lower()
    return len(words) > _NUM_WORDS_BESIDE and copied in f" {' '.join(_WORD.findall(prompt))} ".lower()


def _is_list_mark(text: str, number: re.Match[str]) -> bool:
    """Return whether a number counts an item that nothing follows: the ``2.`` behind ``1. 14 + 7``."""
    mark = re.fullmatch(r"\s*[.):]\s*", text[number.end() :])
    if mark is None or not number.group().isdigit() or text[: number.start()].rpartition("\n")[2].strip():
        return False
    return bool(re.search(rf"^\s*(?:step\s*)?{int(number.group()) - 1}\s*[.):]", text, re.MULTILINE | re.IGNORECASE))


def _copies_numbers(text: str, prompt: str) -> bool:
    """Return whether ``text`` names several numbers, all of the prompt, and concludes nothing: "a = 14 and b = 7"."""
    named = {_plain_token(one) for one in _NUMBER.findall(text)}
    if len(named) < 2 or _CONCLUSION.search(text):
        return False
    return named <= {_plain_token(one) for one in _NUMBER.findall(prompt)}


def _parts(text: str) -> list[str]:
    """The values in a list, set, tuple or matrix, or the one that ``text`` is."""
    if parse_quantity(text) is not None:
        return [text]
    if "matrix}" in text:
        return [part.strip() for part in _ENTRIES.split(text) if part.strip()]
    return [part for part in read_form(text).parts if part]


def _has_result(part: str, is_marked: bool, is_integer: bool) -> bool:
    """Return whether one of the values that are said to be equal in ``part`` is computed."""
    values = [value for value in split(part, _EQUALS) if value]
    named = [value for value in values if not is_name(value)] or values
    return any(_is_computed(value, is_marked, is_integer) for value in named)


def _is_computed(value: str, is_marked: bool, is_integer: bool) -> bool:
    if _POWER_IN_WORDS.search(value):  # words behind a number may be what is counted
        return False
    mixed = _MIXED.search(value)
    if mixed is not None and int(mixed["top"] or mixed["plain_top"]) >= int(mixed["bottom"] or mixed["plain_bottom"]):
        return False
    value = _TIMES.sub(r"\\times ", value)
    if parse_quantity(value) is not None:
        number = parse_number(value)
        return is_marked or not is_integer or number is None or "/" not in value.replace("\\frac", "/")
    if _VARIABLE.search(value):
        return True
    if any(_OPERATION.search(_FRACTION.sub("9", inner)) for inner in _raised(value)):
        return False
    if _LOGARITHM.search(value):
        value = _POWER.sub("9 ", value)
    bare = _AROUND.sub("", _POWER_OF_TEN.sub("", value))
    if _OPERATION.search(_SYMBOLIC_FRACTION.sub("a", _FRACTION.sub("9", bare))):
        return False
    return is_marked or _FUNCTION.search(value) is None


def _raised(value: str) -> list[str]:
    """The exponents and indices of ``value``, fractions aside."""
    raised = [re.sub(r"^[\^_*\s]+[{(]?|[})]$", "", inner) for inner in _AROUND.findall(value)]
    return [inner for inner in raised if (number := parse_number(inner)) is None or number.value.denominator == 1]


def _stands_in(prompt: str, prediction: str, reference: str) -> bool:
    """Return whether ``prediction`` is an expression of ``prompt``, and is not ``reference`` as written."""
    tokens = _tokens(prediction)
    if not tokens or _same_writing(prediction, reference):
        return False
    asked = _tokens(prompt)
    for place in range(len(asked) - len(tokens) + 1):
        if asked[place : place + len(tokens)] != tokens:
            continue
        before, behind = asked[place - 1] if place else "", "".join(asked[place + len(tokens) :][:1])
        if before not in _JOINED and behind not in _JOINED_BEHIND:
            return True
    return False


def _same_writing(prediction: str, reference: str) -> bool:
    """Return whether both are written alike, but for zeros behind decimals, signs of currency, per cent and units."""
    if _tokens(prediction) == _tokens(reference):
        return True
    quantities = parse_quantity(prediction), parse_quantity(reference)
    if None in quantities:
        return not any(character.isdigit() for character in prediction)
    if quantities[0].number.value != quantities[1].number.value:
        return False
    fractions = ["/" in _tokens(text) for text in (prediction, reference)]
    return fractions == [False, False]


def _tokens(text: str) -> list[str]:
    text = plain_spelling(text) if len(text) <= _MAX_SPELLED_CHARS else text
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    return [_plain_token(token) for token in _TOKEN.findall(_LOOKS.sub(" ", text))]


def _plain_token(token: str) -> str:
    if token[:1] == "." and len(token) > 1:
        return f"0{token}"
    return token.replace(",", "") or ","
