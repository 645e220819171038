"""Ground truths of records: one reading for all handlers, whatever form the data set gives it.

A truth is a text, a number or a boolean; a list of one of these; an object with nothing but one of them; a worked
solution, of which the final answer counts; or the JSON (or Python) text of any. What has structure that a verifier
reads, such as unit tests, rubrics and several answers, is kept whole, as JSON.
"""

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from mindrlhf.sandbox.code_tests.unit_tests import looks_like_tests

# How a truth was read where it was not taken as it stands: what a build counts.
FROM_SOLUTION = "taken from a solution (\\boxed, ####)"
FROM_SEVERAL_BOXES = "taken from the last of several boxes"
SEVERAL = "lists of several, kept whole"
OBJECT = "objects, kept whole"

# Objects whose one field is the truth and no structure of its own.
_WRAPPERS = frozenset({"answer", "answers", "final_answer", "ground_truth", "label", "solution", "target", "value"})
# Without braces as in MATH: what no space or dollar sign ends.
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:\{|(?![A-Za-z{])(?P<bare>(?:\{[^{}]{0,60}\}|[^\s{}$]){1,60}))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# A list of one sentence is a rubric of one criterion rather than an answer.
_PROSE = re.compile(r"(?:\b[^\W\d_]{2,}\b\W+){3}")
_MAX_DEPTH = 8


class RecordError(ValueError):
    """One record cannot be used; the message is the reason."""


@dataclass(frozen=True)
class Truth:
    """The text that verifiers compare with, and how it was read; "" where it was taken as it stands."""

    text: str
    how: str = ""


def read_truth(value: object, key: str) -> Truth:
    """Return the truth that a field holds.

    Raises:
        RecordError: it is empty, no finite number, or of a kind that is no answer.
    """
    truth = _read(value, key, 0)
    if not truth.text.strip():
        raise RecordError(f"field {key!r} is empty")
    return truth


def _read(value: object, key: str, depth: int) -> Truth:
    if depth > _MAX_DEPTH:
        raise RecordError(f"field {key!r} is nested too deeply for an answer")
    if isinstance(value, bool):
        return Truth(str(value))
    if isinstance(value, (int, float, Decimal)):
        if not math.isfinite(value):
            raise RecordError(f"field {key!r} is {value}, which is no answer")
        return Truth(str(value))
    if isinstance(value, str):
        return _read_text(value.strip(), key, depth)
    if isinstance(value, (list, tuple)):
        return _read_list(list(value), key, depth)
    if isinstance(value, Mapping):
        return _read_object(value, key, depth)
    raise RecordError(f"field {key!r} must be text, a number, a list or an object, found {type(value).__name__}")


def _read_text(text: str, key: str, depth: int) -> Truth:
    if looks_like_tests(text):
        return Truth(text)
    value = _structure_in(text)
    if value is not None:
        truth = _read(value, key, depth + 1)
        # Of structure that is kept the text stays as the data set spelled it.
        return Truth(text, truth.how) if truth.how in (SEVERAL, OBJECT) else truth
    if (final := _behind_hashes(text)) is not None:
        if not final:
            raise RecordError(f"nothing after '#### ' in field {key!r}")
        return Truth(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", final), FROM_SOLUTION)
    boxes = _boxes(text)
    if not boxes:
        return Truth(text)
    if not boxes[-1].strip():
        raise RecordError(f"field {key!r} ends with an empty \\boxed{{}}")
    if len(boxes) > 1:
        return Truth(boxes[-1].strip(), FROM_SEVERAL_BOXES)
    return Truth(boxes[-1].strip(), FROM_SOLUTION)


def _behind_hashes(text: str) -> str | None:
    """Return what the last line of a text holds behind ``####``, as GSM8K has it; None without these."""
    before, hashes, behind = text.rpartition("####")
    is_marked = hashes and "\n" not in behind.strip() and (not before or before[-1].isspace())
    return behind.strip() if is_marked else None


def _structure_in(text: str) -> object | None:
    """Return the list, object or quoted text that a text is the JSON or Python form of; None where it is none.

    A list of bare numbers may be an interval or a point, so only one with a quoted text, or one number, counts.
    """
    if not text or (text[0], text[-1]) not in {("[", "]"), ("{", "}"), ('"', '"')}:
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(value, list) and len(value) > 1 and not any(isinstance(item, str) for item in value):
            return None
        return value if isinstance(value, (list, dict, str)) and value != {} else None
    return None


def _read_list(items: list, key: str, depth: int) -> Truth:
    if not items:
        raise RecordError(f"field {key!r} is an empty list")
    if any(item is None for item in items):
        raise RecordError(f"field {key!r} holds a null among its answers")
    whole = _as_json(items, key)
    if looks_like_tests(whole):
        return Truth(whole)
    if len(items) > 1:
        return Truth(whole, SEVERAL)
    truth = _read(items[0], key, depth + 1)
    is_criterion = truth.how == OBJECT or not truth.how and isinstance(items[0], str) and _PROSE.search(truth.text)
    return Truth(whole, OBJECT) if is_criterion else truth


def _read_object(fields: Mapping, key: str, depth: int) -> Truth:
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        raise RecordError(f"field {key!r} is an empty object")
    if len(given) == 1 and (name := next(iter(given))) in _WRAPPERS:
        return _read(given[name], f"{key}.{name}", depth + 1)
    whole = _as_json(fields, key)
    return Truth(whole, "" if looks_like_tests(whole) else OBJECT)


def _as_json(value: object, key: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"field {key!r} is no JSON value ({error})") from None


def _boxes(text: str) -> list[str]:
    """Return the contents of all outermost boxes of a text that are closed, in order."""
    contents, end = [], 0
    while box := _BOX.search(text, end):
        if (bare := box["bare"]) is not None:
            contents, end = [*contents, bare.rstrip(".,;:")], box.end()
            continue
        depth, end = 1, len(text)
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                contents.append(text[box.end() : brace.start()])
                end = brace.end()
                break
    return contents
