"""One way to write an answer: Unicode signs, LaTeX for looks and tokens that end a turn brought to plain LaTeX.

Only spelling changes here, never the value: ``４２``, ``$42$``, ``\\mathbf{42}`` and ``42<|im_end|>`` become ``42``,
``½`` becomes ``\\frac{1}{2}``, ``√2`` becomes ``\\sqrt{2}``, ``10,\\!080`` becomes ``10080``, ``x²`` becomes ``x^{2}``.
"""

import functools
import re
import unicodedata
from decimal import Decimal

from mindrlhf.rewards.answers.units import NAMES

# Longer texts are no expressions; they are compared as they are.
MAX_SPELLED_CHARS = 500

# Numbers and words that have one spelling.
SIMPLE = re.compile(r"[-+$]{0,2}[0-9,]*[0-9](?:\.[0-9]+)?|[A-Za-z]+")
_END_TOKEN = re.compile(
    r"\s*(?:<\|[A-Za-z_][A-Za-z0-9_]{0,30}\|>|<\uff5c[^<>\uff5c\s]{1,40}\uff5c>|</?s>"
    r"|<(?:eos|bos|pad|end_of_turn|start_of_turn)>|\[(?:EOS|PAD)\])\s*$"
)
_MAX_END_TOKEN_CHARS = 80

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni"))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ", "0123456789+-=()ni"))
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_RADICALS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
_RADICAL = re.compile(r"([√∛∜])\s*(\{[^{}]*\}|\([^()]*\)|[0-9]+(?:\.[0-9]+)?|\\?[A-Za-z]+(?![A-Za-z])|[A-Za-z])?")
_NAMED_SIGNS = "≠±∓∞∪∩∈∖∠△⌊⌋⌈⌉∑∏∫→⇒"
_SIGN_NAMES = "ne pm mp infty cup cap in setminus angle triangle lfloor rfloor lceil rceil sum prod int to Rightarrow"
_SIGNS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\u207b", "-"),
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff", ""),
    **dict.fromkeys("\u2044\u2215\u00f7", "/"),
    **dict.fromkeys("\u00d7\u2715\u2a2f", "\\times "),
    **dict.fromkeys("\u00b7\u22c5\u2219", "\\cdot "),
    **dict.fromkeys("≤⩽≦", "\\le "),
    **dict.fromkeys("≥⩾≧", "\\ge "),
    **dict.fromkeys("≈≃≅", "\\approx "),
    **dict.fromkeys("∅⌀", "\\emptyset "),
    **dict.fromkeys("\u2018\u2019\u2032", "'"),
    **dict.fromkeys("\u201c\u201d", '"'),
    **dict(zip("⟨〈⟩〉\u066b\u066cµ", "(()).,µ")),
    "\u3001": ", ",
    "\u3002": ". ",
    **{sign: f"\\{name} " for sign, name in zip(_NAMED_SIGNS, _SIGN_NAMES.split())},
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}",
}

_SPACE_COMMAND = r"\\[,;:! ]|\\(?:thinspace|medspace|nobreakspace|quad|qquad)(?![A-Za-z])|~"
_GROUPED = re.compile(
    rf"(?<![0-9.,])([0-9]{{1,3}})((?:(?:\{{,\}}|,?(?:{_SPACE_COMMAND})+\s?|[\u00a0\u2009\u202f\u2007])[0-9]{{3}})+)(?![0-9])"
)
_WITH_DECIMAL_COMMA = re.compile("[-+]?[0-9]{1,3}(?:[\u00a0\u2009\u202f\u2007][0-9]{3})+,[0-9]+")
_SPACED_GROUPS = re.compile(r"([-+$€£¥]*)([0-9]{1,3}(?:([ '\u2019])[0-9]{3})(?:\3[0-9]{3})*)((?:\.[0-9]+)?%?\.?)")
_LEAD = re.compile(
    r"^\s*(?:\\(?:therefore|implies|[Rr]ightarrow)(?![A-Za-z])|\\text\s*\{[^{}]*(?::|\bis|=)\s*\}\s*:?)\s*(?=.)"
)
_QUAD = re.compile(r"\s*,?\s*\\q?quad(?![A-Za-z])\s*")
_SPACES = re.compile(rf"(?<!\\)(?:{_SPACE_COMMAND})")
_LOOKS = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|middle|mathstrut|strut|nonumber|tiny|small|normalsize"
    r"|large|Large|LARGE|huge|Huge|bf|it|em|sf|tt)(?![A-Za-z])"
    r"(?:\s*\.(?![0-9]))?"
)
_FONT = re.compile(
    r"\\(?:mathbf|textbf|boldsymbol|bm|bold|mathit|textit|emph|mathsf|textsf|texttt|mathtt|underline|uline|underbrace|mathbb(?=\s*\{[0-9])|boxed|fbox"
    r"|(?:text)?color\s*\{[a-z]+\})\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_NUMBER_IN_TEXT = re.compile(r"\\(?:text|textrm|textnormal|mathrm|mbox|rm)\s*\{(\s*(?:[-+$]|\\\$)?[0-9][^{}]*)\}")
# 0.333..., 0.1(6), 0.\\dot{1}4285\\dot{7}, 0.3 with a combining line, "0.3 repeating".
_DOTS = re.compile(r"(?<![0-9.])([0-9]+)\.([0-9]+)(?:\s*\.\.\.+|\s*\u2026|\s*\\[lc]?dots(?![A-Za-z]))")
_PERIOD_IN_BRACKETS = re.compile(r"(?<![0-9.])([0-9]+\.[0-9]*)\(([0-9]+)\)(?![0-9^])")
_DOTTED_ENDS = re.compile(r"(?<=[.0-9])\\dot\s*\{?([0-9])\}?([0-9]*)\\dot\s*\{?([0-9])\}?")
_LINES_ABOVE = re.compile(r"((?:[0-9][\u0304\u0305])+)")
_SAID_TO_REPEAT = re.compile(r"(?<![0-9.])([0-9]+\.[0-9]*?)([0-9])\s*\(?(?:repeating|recurring)\)?")
_PLAIN = {"lt": "<", "gt": ">", "lbrace": "\\{", "rbrace": "\\}", "langle": "(", "rangle": ")"}
_COMMANDS = (
    (re.compile(r"\\text(?:normal|up|md|sl)(?![A-Za-z])"), r"\\text"),
    (re.compile(r"(?<=[0-9])\s*(?:¢|\\cent(?![A-Za-z]))"), " cents"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\{\s*([^{}]{1,40}?)\s*\\choose\s*([^{}]{1,40}?)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"[(\[|]?\s*\\begin\{array\}\s*\{[lcr| ]+\}"), r"\\begin{matrix}"),
    (re.compile(r"\\end\{array\}\s*[)\]|]?"), r"\\end{matrix}"),
    (re.compile(r":=|\\(?:coloneqq|equiv)(?![A-Za-z])"), "="),
    (re.compile(r"\\frac\s*([0-9])\s*(?=[0-9{])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9])"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:leqslant|leq|le|lt=)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\(?:neq|ne)(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\(lt|gt|[lr]brace|[lr]angle)(?![A-Za-z])"), lambda match: _PLAIN[match[1]]),
    (re.compile(r"\\(?:varnothing|empty|emptyset)(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\(?:degree|degrees)(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"(?:\\inf|(?<![A-Za-z\\])(?:infinity|inf|oo))(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?:\\sqrt|(?<![A-Za-z\\])sqrt)\s*\(((?:[^()]|\([^()]*\))*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:mathrm|text|textrm|textnormal|mbox|rm|operatorname)\s*\{\s*([ei]|\\pi|\\infty)\s*\}"), r"\1 "),
    (re.compile(r"(?<![A-Za-z\\])(arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|csc|ln|log)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![A-Za-z\\])(sec|exp)(?=\s*[(^])"), r"\\\1"),
    (re.compile(r"(?<![0-9.,_])([0-9]{1,3}(?:_[0-9]{3})+)(?![0-9_])"), lambda match: match[1].replace("_", "")),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\^\s*\(([^()]*)\)"), r"^{\1}"),
    (re.compile(r"\*\*"), "^"),
    (_PERIOD_IN_BRACKETS, r"\1\\overline{\2}"),
    (_DOTTED_ENDS, r"\\overline{\1\2\3}"),
    (re.compile(r"(?<=[.0-9])\\(?:bar|dot|overline)\s*\{?([0-9]+)\}?"), r"\\overline{\1}"),
    (_SAID_TO_REPEAT, r"\1\\overline{\2}"),
    (re.compile(r"\\[lr]?[vV]ert(?![A-Za-z])"), "|"),
    (re.compile(r"\\%|(?<=[0-9.])\s*(?:\\text\{\s*)?(?:percent|per cent)(?![A-Za-z])\s*\}?"), "%"),
    (re.compile(r"\\\$|\\(?:pounds|texteuro|euro)(?![A-Za-z])"), "$"),
)
# Chinese: numerals, and what is counted.
_HAN_DIGITS = dict(zip("零〇一二两兩三四五六七八九", (0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9)))
_HAN_TENS = {"十": 10, "百": 100, "千": 1000}
_HAN_MYRIADS = {"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
_HAN = "零〇一二两兩三四五六七八九十百千万萬亿億"
_HAN_NUMBER = re.compile(rf"(负|負)?(?:(?:([{_HAN}]+)又)?([{_HAN}]+)分之)?([{_HAN}]+)(?:[点點]([{_HAN}]+))?")
_HAN_SHARE = re.compile(rf"(负|負)?百分之([{_HAN}]+|[0-9.]+)")
_MYRIADS = re.compile(r"([-+]?[0-9,]*\.?[0-9]+)\s*([万萬亿億])")
_HAN_COUNTED = re.compile(
    "[元角分个個人只隻本页頁块塊棵条條张張名位次种種辆輛件支枝朵头頭箱袋盒根]"
    "|[双對对座间間匹台首道题岁歲倍层排行组組份]|名?(?:同学|学生)|个人"
)
_HAN_AMOUNT = re.compile(
    rf"([-+]?(?:[0-9][0-9,.]*|\\frac\{{[0-9]+\}}\{{[0-9]+\}}|[{_HAN}]+))\s*([^\x00-\x7f/]+(?:/[^\x00-\x7f]+)?)"
)
_COMMENT = re.compile(r"(?:^|(?<=\s))%[^\n]*\n")
_DISPLAY_MATH = re.compile(r"\\[()\[\]]|\$\$")
_INLINE_MATH = re.compile(r"(?<!\\)\$((?:[^$\\]|\\.)*)\$", re.DOTALL)


def without_end_tokens(text: str) -> str:
    """``text`` without the control tokens at its end (``<|im_end|>``, ``</s>`` ...) and white space there."""
    if not text[-_MAX_END_TOKEN_CHARS:].rstrip().endswith((">", "]")):
        return text
    end = len(text)
    while (match := _END_TOKEN.search(text[max(0, end - _MAX_END_TOKEN_CHARS) : end])) is not None:
        end -= len(match.group())
    return text[:end]


def plain_unicode(text: str) -> str:
    """``text`` with mathematical signs, digits and letters outside ASCII as ASCII and LaTeX; the rest stays."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda match: f"^{{{''.join(_SUPERSCRIPTS[c] for c in match.group())}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{''.join(_SUBSCRIPTS[c] for c in match.group())}}}", text)
    # 1 234,5: the comma is read with its number (``numeric``), which the spaces show it to belong to.
    text = _GROUPED.sub(_joined, text) if _WITH_DECIMAL_COMMA.fullmatch(text) is None else text
    text = "".join(map(_plain_character, text))
    return _RADICAL.sub(_radical, text)


def plain_spelling(text: str) -> str:
    """``text`` in the one spelling that the rules of equality read. Long texts only lose their end tokens."""
    if SIMPLE.fullmatch(text):
        return text
    text = without_end_tokens(_COMMENT.sub(" ", text)).strip()
    if len(text) > MAX_SPELLED_CHARS:
        return text
    if not text.isascii():
        text = _LINES_ABOVE.sub(lambda match: f"\\overline{{{re.sub('[^0-9]', '', match[1])}}}", _without_han(text))
    text = plain_unicode(_DOTS.sub(_periodic, text)).strip().strip("*`").strip()
    # What is no group of three is a decimal comma.
    text = _GROUPED.sub(_joined, text).replace("{,}", ".")
    if "\\" in text or "$" in text:
        # In files \\\\frac may be escaped twice.
        text = _without_looks(text if "\\begin" in text else re.sub(r"\\\\(?=[A-Za-z])", r"\\", text))
    for pattern, spelling in _COMMANDS:
        text = pattern.sub(spelling, text)
    text = re.sub(r"\s+", " ", text).strip().strip('*`"').strip()
    if text.endswith("\\") and not text.endswith("\\\\"):
        text = text[:-1].rstrip()
    match = _SPACED_GROUPS.fullmatch(text)
    if match is not None:
        text = match[1] + match[2].replace(match[3], "") + match[4]
    return text.rstrip(".,; €£¥").strip() or text


def _periodic(match: re.Match[str]) -> str:
    """Write ``0.1666...`` as ``0.1\\overline{6}``; digits without a period stay, with their dots.

    Of several periods that the digits end with, the one that explains most of them is meant: 1000 in ``0.10001000...``.
    """
    whole, digits = match[1], match[2]
    covered, shortest = 0, ""
    for size in range(1, len(digits) // 2 + 1):
        period = digits[-size:]
        length = len(re.search(f"(?:{period})+$", digits).group())
        if length > covered and length >= (3 if size == 1 else 2 * size):
            covered, shortest = length, period
    if covered:
        return f"{whole}.{digits[: len(digits) - covered]}\\overline{{{shortest}}}"
    return f"{whole}.{digits}\\ldots"


def _without_han(text: str) -> str:
    """A Chinese number, alone or with what it counts, in digits: ``四十二``, ``百分之五``, ``3万``, ``5厘米``."""
    plain = text.strip(" 。.$")
    share = _HAN_SHARE.fullmatch(plain)
    if share is not None:
        number = share[2] if share[2][0].isascii() else _han_value(share[2])
        return text if number is None else f"{'-' if share[1] else ''}{number}%"
    if (match := _HAN_NUMBER.fullmatch(plain)) is not None:
        return _han_number(match) or text
    if (match := _MYRIADS.fullmatch(plain)) is not None:
        return str(Decimal(match[1].replace(",", "")) * _HAN_MYRIADS[match[2]])
    match = _HAN_AMOUNT.fullmatch(plain)
    if match is None or not (match[2] in NAMES or _HAN_COUNTED.fullmatch(match[2])):
        return text
    number = match[1]
    if number[-1] in _HAN:
        number = _han_value(number)
    return text if number is None else f"{number} {NAMES.get(match[2], '')}".rstrip()


def _han_number(match: re.Match[str]) -> str | None:
    sign, whole, bottom, top, decimals = match.groups()
    value = _han_value(top)
    if value is None:
        return None
    if decimals is not None:
        digits = [_HAN_DIGITS.get(character) for character in decimals]
        return None if bottom or None in digits else f"{'-' if sign else ''}{value}.{''.join(map(str, digits))}"
    if bottom is not None:
        divisor = _han_value(bottom)
        if not divisor or (whole and _han_value(whole) is None):
            return None
        return f"{'-' if sign else ''}{_han_value(whole) if whole else ''}\\frac{{{value}}}{{{divisor}}}"
    return f"{'-' if sign else ''}{value}"


def _han_value(text: str) -> int | None:
    """The whole number that ``text`` is, by tens within ten thousands; or a row of digits (``二〇二四``)."""
    if len(text) > 1 and all(character in _HAN_DIGITS for character in text):
        return int("".join(str(_HAN_DIGITS[character]) for character in text))
    total, section, digit = 0, 0, None
    for character in text:
        if character in _HAN_DIGITS:
            if digit:
                return None
            digit = _HAN_DIGITS[character]
        elif character in _HAN_TENS:
            section += (1 if digit in (None, 0) else digit) * _HAN_TENS[character]
            digit = None
        else:
            section += digit or 0
            total, section, digit = total + section * _HAN_MYRIADS[character], 0, None
    return total + section + (digit or 0)


def _without_looks(text: str) -> str:
    text = _LEAD.sub("", text).removesuffix("\\checkmark")
    pieces = _QUAD.split(text)
    if len(pieces) > 1 and all("=" in piece for piece in pieces):
        text = ", ".join(pieces)
    text = _SPACES.sub(lambda match: "" if match.group() == "\\!" else " ", text)
    text = _LOOKS.sub("", text)
    for _ in range(3):
        text = _NUMBER_IN_TEXT.sub(r"\1", _FONT.sub(r"\1", text))
    text = _INLINE_MATH.sub(r"\1", _DISPLAY_MATH.sub("", text))
    return text.removesuffix("$") if not text.endswith("\\$") else text


def _joined(match: re.Match[str]) -> str:
    return match[1] + re.sub("[^0-9]", "", match[2])


def _radical(match: re.Match[str]) -> str:
    content = match[2] or ""
    if content[:1] in ("{", "("):
        content = content[1:-1]
    return f"{_RADICALS[match[1]]}{{{content}}}"


@functools.lru_cache(maxsize=4096)
def _plain_character(character: str) -> str:
    if character.isascii():
        return character
    if character in _SIGNS:
        return _SIGNS[character]
    if (decimal := unicodedata.decimal(character, None)) is not None:
        return str(decimal)
    if unicodedata.category(character) == "Zs":
        return " "
    plain = unicodedata.normalize("NFKC", character)
    if "\u2044" in plain and plain.replace("\u2044", "").isdigit():
        top, _, bottom = plain.partition("\u2044")
        return f"\\frac{{{top}}}{{{bottom}}}"
    name = unicodedata.name(plain, "") if len(plain) == 1 else ""
    if name.startswith("GREEK SMALL LETTER ") and name.removeprefix("GREEK SMALL LETTER ").isalpha():
        return f"\\{name.rpartition(' ')[2].lower()} "
    if name == "GREEK CAPITAL LETTER OMEGA":
        return "\\Omega "
    # Full-width and mathematical letters and signs.
    return plain if len(plain) == 1 and plain.isascii() else character
