"""Hydra's interpolations: ``${other.key}``, ``${.sibling}``, ``${oc.env:NAME,default}``, ``${oc.select:key,default}``.

After OmegaConf's documentation (https://omegaconf.readthedocs.io, "Variable interpolation" and "Resolvers").
"""

import re
from collections.abc import Mapping
from typing import Any

from mindrlhf.config.imports.shell_syntax import SyntaxMistakeError, skip

_MAX_STEPS = 200
_REFERENCE = re.compile(r"\.*[\w@-]+(?:\.[\w@-]+|\[[\w-]+\])*")


class _UnknownError(Exception):
    """Only the environment, or another program, knows the value."""


def resolve(name: str, value: Any, flat: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the value of a key with its interpolations put in, or what of it is not known.

    Args:
        name: dotted name of the key.
        flat: all keys by dotted name. What they lack is as if it were not given.

    Returns:
        The value, and text: empty, or the interpolation that cannot be followed.
    """
    try:
        return _Resolver(flat).value(name, value), ""
    except _UnknownError as error:
        return None, str(error)


class _Resolver:
    def __init__(self, flat: Mapping[str, Any]):
        self.flat = flat
        self.steps = 0

    def value(self, name: str, value: Any) -> Any:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise _UnknownError("an interpolation that does not end")
        if isinstance(value, list) and any(isinstance(one, str) and "${" in one for one in value):
            return [self.value(name, one) for one in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        parts: list[Any] = []
        at = 0
        while at < len(value):
            start = value.find("${", at)
            if start < 0 or value[start - 1 : start] == "\\":
                parts.append(value[at:].replace("\\${", "${") if start >= 0 else value[at:])
                break
            end = _end(value, start)
            parts += [value[at:start], self._one(name, value[start + 2 : end - 1])]
            at = end
        found = [part for part in parts if part != ""]
        if len(found) == 1:
            return found[0]
        return None if None in found else "".join(map(str, found))

    def _one(self, name: str, inner: str) -> Any:
        inner = inner.strip()
        if _REFERENCE.fullmatch(inner):
            return self._follow(name, inner)
        resolver, _, arguments = inner.partition(":")
        first, comma, default = _first_argument(arguments)
        if resolver == "oc.env":
            if not comma:
                raise _UnknownError(f"${{{inner}}}")
            return self.value(name, _plain(default))
        if resolver == "oc.select":
            found = self._follow(name, first)
            return self.value(name, _plain(default)) if found is None else found
        if resolver == "oc.decode":
            return self.value(name, _plain(str(self.value(name, arguments))))
        raise _UnknownError(f"${{{inner}}}")

    def _follow(self, name: str, reference: str) -> Any:
        dots = len(reference) - len(reference.lstrip("."))
        base = name.split(".")[:-dots] if dots else []
        target = ".".join([*base, re.sub(r"\[([\w-]+)\]", r".\1", reference.lstrip("."))])
        if target in self.flat:
            return self.value(target, self.flat[target])
        listed, _, number = target.rpartition(".")
        items = self.flat.get(listed)
        if isinstance(items, list) and number.isdecimal() and int(number) < len(items):
            return self.value(listed, items[int(number)])
        return None


def _end(text: str, start: int) -> int:
    try:
        return skip(text, start)
    except SyntaxMistakeError:
        raise _UnknownError(text[start : start + 60]) from None


def _first_argument(text: str) -> tuple[str, str, str]:
    depth = 0
    for at, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and not depth:
            return text[:at].strip(), ",", text[at + 1 :].strip()
    return text.strip(), "", ""


def _plain(text: str) -> Any:
    """Return a default as OmegaConf reads it: numbers, truths, null, text with or without quotes."""
    if re.fullmatch(r"'[^']*'|\"[^\"]*\"", text):
        return text[1:-1]
    words = {"null": None, "none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[-+]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d{1,3})?", text):
        return float(text)
    return text
