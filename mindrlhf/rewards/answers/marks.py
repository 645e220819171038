"""Words that mark, deny and join answers, by language: the table ``marks.json``, which a user's file can extend.

A phrase is text; ``|`` is between phrases and ``...`` stands for words of the same sentence. The fields of a language:

- ``answer``: nouns for the answer; ``equals``: between such a noun and its value; ``choose``: before a choice's letter;
- ``concludes``: before a result that nothing marks ("so"); ``because``: begins a reason; ``ends``: closes a sentence
  behind its value, such as the copula of Japanese;
- ``denies``: before, or in some languages behind, what is not the answer; ``rather``: between that and what it is;
  ``rejects``: makes the value in its clause no answer ("suppose"), ``supposes``: that in its sentence ("if ... were");
  ``wrong``: behind "is", says so of the value before it; ``takes_back``: before another answer ("wait"); ``joins``:
  between answers side by side;
- ``others``: whose answers are not the response's own;
- ``decimal_comma``: "yes" where 3,5 is three and a half.
"""

import functools
import json
import re
import unicodedata
from pathlib import Path

from mindrlhf.errors import UserError

LANGUAGES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("marks.json").read_text(encoding="utf-8"))
FIELDS = "|".join(sorted({field for words in LANGUAGES.values() for field in words}))
_WIDE = {c: unicodedata.normalize("NFKC", chr(c)) for c in range(0xFF01, 0xFF5C) if c != 0xFF0C}
_WIDE |= {ord(sign): f"{plain} " for sign, plain in zip("\uff1a\uff1b\uff01\uff1f\u3002\uff61", ":;!?..")}
_WIDE |= {ord("\u3000"): " ", ord("\u2019"): "'", ord("\u300c"): " ", ord("\u300d"): " ", ord("\u2192"): "\\to "}
_WORD_START = r"(?<![^\W\d_])"
_COMMA_IN_NUMBER = re.compile("(?<=[0-9\uff10-\uff19])\uff0c(?=[0-9\uff10-\uff19]{3})")


def plain_width(text: str) -> str:
    """``text`` with full-width signs, digits and letters as ASCII; a sign that ends a clause has a space behind it."""
    return text if text.isascii() else _COMMA_IN_NUMBER.sub(",", text).replace("\uff0c", ", ").translate(_WIDE)


@functools.cache
def extend(path: str) -> None:
    """Add the languages of a JSON file, ``{"Italian": {"answer": "risposta|risultato", "equals": "è"}}``.

    Raises:
        UserError: the file cannot be read, or is not such a table.
    """
    try:
        languages = json.loads(Path(path).read_text(encoding="utf-8"))
        pairs = [pair for words in languages.values() for pair in words.items()]
        unknown = [field for field, phrases in pairs if not re.fullmatch(FIELDS, field) or not phrases.strip()]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"marks {path!r} is no table of languages: {error}") from error
    if unknown:
        raise UserError(f"marks {path!r}: a language has texts for {FIELDS.replace('|', ', ')}, not {unknown[0]!r}")
    LANGUAGES.update(languages)
    pattern.cache_clear()


def has_decimal_comma(text: str) -> bool:
    """Return whether ``text`` speaks of its answer in a language that writes 3,5 for three and a half."""
    nouns, others = _phrases("answer", has_comma=True), _phrases("answer", has_comma=False)
    return any(match.group().lower() in nouns - others for match in pattern("<answer>").finditer(text))


@functools.cache
def pattern(template: str) -> re.Pattern[str]:
    """``template`` compiled, with ``<answer>`` or ``<denies|rejects>`` for any phrase of those fields."""
    field = re.compile(rf"<((?:{FIELDS}|\|)+)>")
    return re.compile(field.sub(lambda match: _any_of(match[1].split("|")), template), re.IGNORECASE)


def _any_of(fields: list[str]) -> str:
    phrases = sorted({phrase for field in fields for phrase in _phrases(field)}, key=lambda text: (-len(text), text))
    words = [phrase for phrase in phrases if _begins_a_word(phrase)]
    others = [phrase for phrase in phrases if not _begins_a_word(phrase)]
    # No word is tried within another; the others begin with other letters, so that any order is right.
    return f"(?:{_WORD_START}{_tree(words)}|{_tree(others)})"


def _tree(phrases: list[str]) -> str:
    """Any of ``phrases``. Those with one first letter stand together behind it, so that few are tried at a place."""
    rests: dict[str, list[str]] = {}
    for phrase in phrases:
        rests.setdefault(re.escape(phrase[0]), []).append(_rest(phrase))
    groups = [f"{letter}(?:{'|'.join(ends)})" for letter, ends in rests.items()]
    return f"(?=[{''.join(rests)}])(?:{'|'.join(groups)})" if rests else "(?!)"


def _phrases(field: str, has_comma: bool | None = None) -> set[str]:
    languages = [words for words in LANGUAGES.values() if has_comma in (None, "decimal_comma" in words)]
    return {phrase for words in languages for phrase in words.get(field, "").lower().split("|")} - {""}


def _rest(phrase: str) -> str:
    """``phrase`` behind its first letter, and the end of a word in scripts that have spaces between words."""
    text = re.escape(phrase[1:]).replace("\\ ", r"\s+").replace(r"\.\.\.", r"[^.!?\n]{0,80}?")
    return text + (r"(?![^\W\d_])" if _is_spaced(phrase[-1]) else "")


def _begins_a_word(phrase: str) -> bool:
    return _is_spaced(phrase[0]) and phrase != "n't"


def _is_spaced(character: str) -> bool:
    return character.isalpha() and ord(character) < 0x1100
