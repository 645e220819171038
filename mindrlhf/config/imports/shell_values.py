"""Values of a shell's variables, and what is known of them.

What only the shell can tell is a mark within the text: the source text of what it would have to run or look up.
"""

import fnmatch
import re

from mindrlhf.config.imports.arithmetic import evaluate

# A mark: what begins it (UNSET where a variable was never set), the source text, and its end.
UNKNOWN, UNSET, END = "\ue000", "\ue001", "\ue002"
MARK = re.compile(f"[{UNKNOWN}{UNSET}]([^{END}]*){END}")
ONE_UNSET = re.compile(f"{UNSET}[^{END}]*{END}")
FIELD = re.compile(f"(?:[{UNKNOWN}{UNSET}][^{END}]*{END}|\\S)+")
MAX_TEXT_SHOWN = 100

Value = str | list[str] | dict[str, str]


def unknown_part(text: str) -> str | None:
    """Return what of a word only the shell knows, as the script says it; None where all of it is known."""
    found = list(dict.fromkeys(match[1] for match in MARK.finditer(text)))
    return ", ".join(found) or None


def mark(source: str, kind: str = UNKNOWN) -> str:
    shown = " ".join(MARK.sub(r"\1", source).split())
    return kind + (shown if len(shown) <= MAX_TEXT_SHOWN else shown[:MAX_TEXT_SHOWN] + "...") + END


def is_unknown(value: Value | None) -> bool:
    return value is not None and any(MARK.search(one) for one in items_of(value))


def is_unset(value: Value | None) -> bool:
    return value is None or isinstance(value, str) and ONE_UNSET.fullmatch(value) is not None


def items_of(value: Value | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value.values() if isinstance(value, dict) else value)


def either(values: list[Value | None], reason: str) -> Value:
    """What is known where each may be so: an array's items that all have, and marks for the others."""
    if not any(isinstance(value, list | dict) for value in values):
        shown = dict.fromkeys(MARK.sub(r"\1", one) if one else "nothing" for one in values)
        return mark(f"{' or '.join(shown)}, by {reason}")
    arrays = [items_of(value) for value in values]
    common = [one for one in arrays[0] if all(one in array for array in arrays)]
    found: dict[str, list[str]] = {}
    for one in dict.fromkeys(one for array in arrays for one in array if one not in common):
        key, equals, value = one.partition("=")
        found.setdefault(key + equals, []).append(MARK.sub(r"\1", value if equals else one))
    return common + [
        (key if key.endswith("=") else "")
        + mark(f"{' or '.join(some if some[1:] else [*some, 'nothing'])}, by {reason}")
        for key, some in found.items()
    ]


def compare(left: str, operator: str, right: str, is_pattern: bool) -> bool | None:
    if operator in ("=", "==", "!="):
        is_same = fnmatch.fnmatchcase(left, right) if is_pattern else left == right
        return is_same is (operator != "!=")
    if operator in ("<", ">"):
        return left < right if operator == "<" else left > right
    numbers = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
    if operator in numbers and all(re.fullmatch(r"\s*-?\d{1,18}\s*", one) for one in (left, right)):
        return bool(evaluate(f"({left}){numbers[operator]}({right})", lambda name: ""))
    return None


def trimmed(value: str, side: str, is_longest: bool, pattern: str) -> str:
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if is_longest else lengths:
        part = value[:length] if side == "#" else value[len(value) - length :]
        if fnmatch.fnmatchcase(part, pattern):
            return value[length:] if side == "#" else value[: len(value) - length]
    return value


def ansi(text: str) -> str:
    plain = {"n": "\n", "t": "\t", "r": "\r", "0": "", "a": "", "b": ""}
    return re.sub(r"\\(.)", lambda match: plain.get(match[1], match[1]), text, flags=re.DOTALL)
