"""Answers in words, and of numbers and words in order: dates, times of day, measures in two units, remainders.

In algebra a product commutes; in words nothing does: "2 R 7" is not "7 R 2", "2 ft 6 in" not "6 ft 2 in", "BCA" not
"ABC". ``is_algebra`` tells them apart, and what is no algebra is compared word by word, in order (``words_of``).
Texts here are in the spelling of ``spelling.plain_spelling``.
"""

import re
from collections.abc import Hashable

from mindrlhf.rewards.answers.choices import unwrapped
from mindrlhf.rewards.answers.numeric import parse_number
from mindrlhf.rewards.answers.units import measure

# Longer texts are in no form that is known here.
MAX_WORDED_CHARS = 200

# What people write for the same thing, as whole answers.
_STANDARD = (
    (
        r"none|nothing|(?:(?:(?:there|it|the equation|the system|this) )?(?:is|are|has|have) )?no "
        r"(?:real |integer |such |valid |possible |positive )*"
        r"(?:solutions?|roots?|zeros?|answers?|values?|numbers?|integers?|[a-z])(?: in (?:the )?reals?)?(?: exists?)?"
        r"|(?:the )?(?:empty|null) set|(?:方程)?[无無没][有实實数數]*[解根]|空集",
        "\\emptyset",
    ),
    (r"d\.? ?n\.? ?e\.?|(?:it |the limit )?(?:does not|doesn't|do not|don't) exist|不存在", "does not exist"),
    (r"(?:it )?(?:is )?(?:not defined|undefined)|无定义|没有定义", "undefined"),
    (
        r"(?:(?:there|it) (?:are|is|has) )?(?:infinitely many|infinite(?:ly)?|an infinite number of)"
        r"(?: (?:real )?(?:solutions?|values?|many))?|无穷多个?解?|无数个?解?",
        "infinitely many",
    ),
    (
        r"(?:the )?(?:set of )?(?:all|any|every)(?: the)? reals?(?: numbers?)?|x can be any real number"
        r"|(?:全体|任意|所有)实数",
        "\\mathbb{R}",
    ),
    (r"\+?(?:positive )?infinity", "\\infty"),
    (r"对|正确|对的|是正确的", "正确"),
    (r"错|错误|不对|不正确|错的", "错误"),
)
_STANDARD_FORMS = tuple((re.compile(pattern, re.IGNORECASE), form) for pattern, form in _STANDARD)

_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-z]*\}")
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mbox|rm)\s*\{[^{}]*(?:[^\W\d_]{2}|[^\x00-\x7f])")
_RUN = re.compile(r"[A-Za-z]{2,}")
# Written as factors, a number stands before a letter, and no number behind another.
_FACTORS_TURNED = re.compile(r"(?<![0-9.][eE])(?<=[A-Za-z])(?<![0-9.]e)\s*[0-9]")
_NUMBERS_APART = re.compile(r"(?<![0-9.^_])[0-9][0-9.]*\s+[0-9]")
_PATH = re.compile(r"[A-Z](?:\s*-\s*[A-Z]){2,}")
_FIGURE = re.compile(r"\\(?:angle|triangle|widehat|overline|vec|overrightarrow)\s*\{?\s*[A-Z]{3,}\s*\}?")
_SYMBOLS = re.compile(r"(?=.*[0-9])(?:[A-Z][a-z]?(?:_?\{?[0-9]+\}?)?){2,}")
_ROMAN = re.compile("[IVXLCDM]{2,}")
_SHORT_WORDS = re.compile("no|on|up|in|of|or|is|it|at|by|as|to|if|so|we|be|do|go|he|us")
# "abcd" is no product that anybody writes.
MAX_FACTORS = 3

_WORD = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?|\\?[^\W\d_]+|[^\s.,]")
_ARTICLE = re.compile(r"\b(?:[Aa]n?|[Tt]he)\s+(?=[a-z]{2})")

_MONTH_NAMES = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_MONTHS = {name[:size]: number for number, name in enumerate(_MONTH_NAMES, start=1) for size in {3, 4, len(name)}}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_DAY = r"(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?"
_DATES = (
    re.compile(rf"(?P<month>{_MONTH})\.?\s+{_DAY}(?:,?\s+(?P<year>[0-9]{{4}}))?", re.IGNORECASE),
    re.compile(rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?(?P<month>{_MONTH})\.?(?:,?\s+(?P<year>[0-9]{{4}}))?", re.IGNORECASE),
    re.compile(r"(?P<year>[0-9]{4})(?P<mark>[-/.])(?P<month>[0-9]{1,2})(?P=mark)(?P<day>[0-9]{1,2})"),
    re.compile(r"(?P<year>[0-9]{4})\s*年\s*(?P<month>[0-9]{1,2})\s*月\s*(?P<day>[0-9]{1,2})\s*[日号]?"),
    re.compile(r"(?P<month>[0-9]{1,2})\s*月\s*(?P<day>[0-9]{1,2})\s*[日号](?P<year>)"),
)
# Which is the month depends on the country.
_NUMERIC_DATE = re.compile(r"([0-9]{1,2})([-/.])([0-9]{1,2})\2([0-9]{4})")
_TIME = re.compile(r"(?P<hour>[0-9]{1,2})(?::(?P<minute>[0-9]{2}))?\s*(?P<half>[ap])\.?\s*m\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2})")
_REMAINDER = re.compile(
    r"(?:quotient\s*(?:of|is|=|:)?\s*)?([0-9]+)\s*,?\s*(?:and\s+|with\s+)?(?:an?\s+|the\s+)?"
    r"(?:r|rem\.?|remainder)\s*(?:of|is|=|:)?\s*([0-9]+)",
    re.IGNORECASE,
)
_AMOUNT = r"[0-9]+(?:\.[0-9]+|/[0-9]+)?"
_PART = re.compile(rf"\s*(?:,|and\b)?\s*({_AMOUNT})\s*([A-Za-z]+)\.?(?![A-Za-z])", re.IGNORECASE)
_FEET_AND_INCHES = re.compile(r"([0-9]+)\s*'\s*([0-9]+(?:\.[0-9]+)?)\s*(?:\"|'')?")
_COUNTS = re.compile(rf"{_AMOUNT} [A-Za-z]+(?: [A-Za-z]+)?(?:(?:,| and|, and) {_AMOUNT} [A-Za-z]+(?: [A-Za-z]+)?)+")
_COUNT = re.compile(rf"({_AMOUNT}) ([A-Za-z]+(?: (?!and\b)[A-Za-z]+)?)")
_ORDER = re.compile(r"[A-Za-z](?:\s*<\s*[A-Za-z]){2,}|[A-Za-z](?:\s*>\s*[A-Za-z]){2,}")
_BOUNDS = {"greater": ">", "more": ">", "larger": ">", "less": "<", "smaller": "<", "least": "\\ge ", "most": "\\le "}
_BOUND = re.compile(
    r"([A-Za-z]) (?:is|must be) (?:(greater|more|larger|less|smaller) than|at (least|most)) ([^A-Za-z ]+)"
)
_SHARE = re.compile(rf"({_AMOUNT}) (?:out of|in|over) ({_AMOUNT})")


def standard_form(text: str) -> str:
    """``text``, or the one way to write what it says in whole: ``no real roots`` is ``\\emptyset``."""
    plain = re.sub(r"\s+", " ", unwrapped(text)).strip(" .!")
    if len(plain) > MAX_WORDED_CHARS:
        return text
    share = _SHARE.fullmatch(plain)
    if share is not None:
        return f"{share[1]}/{share[2]}"
    if (bound := _BOUND.fullmatch(plain)) is not None:
        return f"{bound[1]} {_BOUNDS[bound[2] or bound[3]]} {bound[4]}"
    return next((form for pattern, form in _STANDARD_FORMS if pattern.fullmatch(plain)), text)


def is_algebra(text: str) -> bool:
    """Return whether ``text`` may be read as algebra, where letters are variables and stand for factors.

    It is not when two letters in a row are a word or a unit, when a number follows a letter or another number
    (``7 R 2``), or when it is a chain of letters (``A-B-C``) or of symbols with numbers (``H_2O``).
    """
    if _TEXT.search(text) or any(form.fullmatch(text.strip()) for form in (_PATH, _SYMBOLS, _FIGURE)):
        return False
    bare = _COMMAND.sub(r"\\", _ENVIRONMENT.sub(r"\\\\", text))
    if not bare.isascii() or _FACTORS_TURNED.search(bare) or _NUMBERS_APART.search(bare):
        return False
    return not any(_is_word(bare, run) for run in _RUN.finditer(bare))


def _is_word(text: str, run: re.Match[str]) -> bool:
    word = run.group()
    before, behind = text[: run.start()], text[run.end() :]
    if len(word) > MAX_FACTORS or len(set(word)) < len(word):
        return True
    if not before.strip() and not behind.strip():
        is_name = _SHORT_WORDS.fullmatch(word.lower()) or _ROMAN.fullmatch(word)
        return len(word) == MAX_FACTORS or is_name is not None
    if behind[:1].isspace() and behind.lstrip()[:1].isalnum():
        return True
    if before[-1:].isspace():
        neighbour = before.rstrip()[-1:]
        is_unit = measure(word) is not None or _SHORT_WORDS.fullmatch(word) is not None
        return neighbour.isalpha() or (neighbour.isdigit() and is_unit)
    return False


def words_of(text: str) -> tuple[Hashable, ...]:
    """The words, numbers (by value) and signs of ``text`` in order, without articles; ``4 to 3`` is ``4:3``."""
    text = re.sub(r"\\(?:text[a-z]*|mathrm|mbox|rm)\s*\{([^{}]*)\}", r" \1 ", text[:MAX_WORDED_CHARS])
    text = re.sub(r"\\(?:to|rightarrow|longrightarrow|Rightarrow)(?![A-Za-z])|-+>|=>", "→", text)
    text = _ARTICLE.sub("", re.sub(r"\b(?:is\s+)?to\b", ":", text, flags=re.IGNORECASE))
    words: list[Hashable] = []
    for word in _WORD.findall(text):
        number = parse_number(word) if word[0].isdigit() else None
        words.append(number.value if number is not None else measure(word) or word.casefold())
    return tuple(words)


def ordered_form(text: str) -> tuple[Hashable, ...] | None:
    """A date, a remainder, a measure in several units, or an order of letters, as values in order; else None."""
    plain = unwrapped(re.sub(r"\\(?:text[a-z]*|mathrm|mbox|rm)\s*\{([^{}]*)\}", r" \1 ", text))
    plain = re.sub(r"\s+", " ", plain).strip()
    if len(plain) > MAX_WORDED_CHARS:
        return None
    for pattern in _DATES:
        match = pattern.fullmatch(plain)
        if match is not None:
            month = _MONTHS.get(match["month"].lower()) or int(match["month"])
            if month <= 12 and 1 <= int(match["day"]) <= 31:
                return "date", int(match["year"] or 0), month, int(match["day"])
    if (match := _NUMERIC_DATE.fullmatch(plain)) is not None:
        return "numeric date", int(match[1]), int(match[3]), int(match[4])
    if (match := _REMAINDER.fullmatch(plain)) is not None:
        return "remainder", int(match[1]), int(match[2])
    if (match := _FEET_AND_INCHES.fullmatch(plain)) is not None:
        return "measures", (parse_number(match[1]).value, "ft"), (parse_number(match[2]).value, "in")
    if _ORDER.fullmatch(plain) is not None:
        letters = re.findall("[A-Za-z]", plain)
        return "order", *(letters if "<" in plain else letters[::-1])
    return _measures(plain)


def _measures(text: str) -> tuple[Hashable, ...] | None:
    parts, place = [], 0
    while place < len(text):
        match = _PART.match(text, place)
        unit = None if match is None else measure(match[2])
        number = None if unit is None else parse_number(match[1])
        if number is None:
            return None
        parts.append((number.value, unit))
        place = match.end()
    units = [unit for _, unit in parts]
    return ("measures", *parts) if len(parts) > 1 and len(set(units)) == len(units) else None


def counts(text: str) -> dict[str, Hashable] | None:
    """Number by thing of a list of things that differ: ``3 red, 4 blue``; else None."""
    plain = re.sub(r"\s+", " ", unwrapped(text))
    if len(plain) > MAX_WORDED_CHARS or _COUNTS.fullmatch(plain) is None:
        return None
    found = [(things.casefold(), parse_number(number)) for number, things in _COUNT.findall(plain)]
    by_thing = {things: number.value for things, number in found if number is not None}
    return by_thing if len(by_thing) == len(found) > 1 else None


def times_equal(prediction: str, reference: str) -> bool | None:
    """Return whether both are the same time of day (``3:30 p.m.``, ``15:30``); None when neither is clearly one."""
    found = [_time(text) for text in (prediction, reference)]
    if not any(time is not None and time[2] for time in found):
        return None
    if None in found:
        return False
    (hour, minute, half), (other_hour, other_minute, other_half) = found
    if half == other_half or (half in ("a", "p")) == (other_half in ("a", "p")):
        return (_hours(hour, half), minute) == (_hours(other_hour, other_half), other_minute)
    # One side says which half of the day it means: the other has the same figures, or those of 24 hours.
    marked, plain = ((hour, half), other_hour) if half in ("a", "p") else ((other_hour, other_half), hour)
    return minute == other_minute and plain in (marked[0], _hours(*marked))


def _time(text: str) -> tuple[int, int, str] | None:
    """Hour, minute and what shows that it is a time: ``a`` or ``p``, ``0`` for a leading zero, or nothing."""
    plain = unwrapped(re.sub(r"\\(?:text[a-z]*|mathrm|mbox|rm)\s*\{([^{}]*)\}", r" \1 ", text[:MAX_WORDED_CHARS]))
    plain = re.sub(r"\s+", " ", plain).strip()
    plain = {"noon": "12:00 pm", "12 noon": "12:00 pm", "midnight": "12:00 am", "12 midnight": "12:00 am"}.get(
        plain.lower(), plain
    )
    match = _TIME.fullmatch(plain)
    if match is None:
        match = _CLOCK.fullmatch(plain)
        if match is None:
            return None
        has_zero = match["hour"].startswith("0") or (match["minute"].startswith("0") and int(match["hour"]) < 24)
        return int(match["hour"]), int(match["minute"]), "0" if has_zero else ""
    return int(match["hour"]), int(match["minute"] or 0), match["half"].lower()


def _hours(hour: int, half: str) -> int:
    return hour if half not in ("a", "p") else hour % 12 + (12 if half == "p" else 0)
