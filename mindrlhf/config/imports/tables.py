"""Tables `their key -> our key[, function]` of other stacks, and their application to the flat keys of a file.

A stack is a module with ``TABLE``, and ``DEFAULTS``, its own where a file says nothing and ours are different.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

Values = dict[str, Any]  # ours, by "section.key"
_OF_SHELL = re.compile(r"\$\{[^}]*\}?|\$\([^)]*\)?|\$\w+")


class LeftToUserError(Exception):
    """Advice instead of a value; ``values`` are those of our keys that are known all the same."""

    def __init__(self, text: str, values: Values | None = None):
        super().__init__(text)
        self.values = values or {}


# Our key, "" for several or none of ours; and None, a type, a mapping of their values to ours, or a function of the
# value and a `Source`. The result is our value, a dict of several keys, or None where the key asks for nothing.
Entry = tuple[str, Any]
Table = dict[str, Entry]


def pairs(section: str, names: str, convert: Any = None) -> Table:
    """Return a table of ``theirs=ours`` words, or of a word that is a name on both sides; ours are of ``section``."""
    words = [word.partition("=") for word in names.split()]
    return {theirs: (f"{section}.{ours or theirs}", convert) for theirs, _, ours in words}


def each(names: str, convert: Any) -> Table:
    """Return a table of keys that ``convert`` turns into several of ours, or none."""
    return dict.fromkeys(names.split(), ("", convert))


def todo(names: str, text: str, values: Values | None = None) -> Table:
    """Return a table of keys that the user has to see to; ``values`` stand in the config until then."""

    def advise(value: Any, source: "Source") -> None:
        raise LeftToUserError(text, values)

    return each(names, advise)


def only(names: str, *allowed: Any, otherwise: str) -> Table:
    """Return a table of keys that ask for nothing as long as they have one of these values."""

    def check(value: Any, source: "Source") -> None:
        if value not in allowed:
            raise LeftToUserError(f"{value!r} has no counterpart: {otherwise}")

    return each(names, check)


def under(prefix: str, *tables: Table) -> Table:
    return {f"{prefix}.{name}": entry for table in tables for name, entry in table.items()}


def flatten(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def only_shell_knows(value: Any) -> str:
    """Return what of a value its shell or Hydra alone knows, in words; empty where all is known."""
    match = _OF_SHELL.search(str(value)) if isinstance(value, str | list) else None
    return f"depends on {match[0]}, which the importer does not read" if match else ""


class Source:
    """Flat keys of a foreign config: those of the file, else that stack's defaults."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.given = given
        self.defaults = dict(flatten(defaults))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` where neither the file nor the stack has one.

        Raises:
            LeftToUserError: only the shell knows it.
        """
        value = self.given.get(name)
        value = self.defaults.get(name) if value is None else value
        if text := only_shell_knows(value):
            raise LeftToUserError(f"goes with {name}: {text}")
        return default if value is None else value


@dataclasses.dataclass
class Translation:
    """A config of ours, and the fate of each key of theirs."""

    values: Values = dataclasses.field(default_factory=dict)
    origins: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # our key -> theirs that gave it
    without: list[str] = dataclasses.field(default_factory=list)  # no counterpart, not known, or nothing asked for
    for_user: dict[str, str] = dataclasses.field(default_factory=dict)  # their key -> advice


def find(stack: ModuleType, name: str) -> Entry | None:
    """Return the entry of a key; of several patterns that of the one with the most letters beside the ``*``."""
    matching = [pattern for pattern in stack.TABLE if pattern == name or fnmatch.fnmatchcase(name, pattern)]
    best = max(matching, key=lambda pattern: (pattern == name, len(pattern.replace("*", ""))), default=None)
    return stack.TABLE.get(best)


def translate(source: Source, stack: ModuleType) -> Translation:
    """Apply a stack's table to every key of the file, and to its defaults of keys that the file leaves out."""
    result = Translation()
    # Defaults first: where two keys give one of ours, the file's wins.
    for name, value in source.defaults.items():
        if source.given.get(name) is None and name in stack.TABLE:
            _apply(stack.TABLE[name], name, f"{name} (default)", value, source, result)
    for name, value in source.given.items():
        entry = find(stack, name)
        if entry is None or value == "":
            result.without.append(name)
        elif value is not None:
            _apply(entry, name, name, value, source, result)
    return result


def _apply(entry: Entry, name: str, label: str, value: Any, source: Source, result: Translation) -> None:
    try:
        values = _values(entry, value, source)
    except LeftToUserError as error:
        values = error.values
        result.for_user[name] = str(error)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
        result.for_user[name] = f"{value!r} is not understood: set {entry[0] or 'it'} by hand"
        return
    for key, our_value in values.items():
        result.values[key] = our_value
        result.origins.setdefault(key, []).append(label)
    if not values and name == label and name not in result.for_user:
        result.without.append(name)


def _values(entry: Entry, value: Any, source: Source) -> Values:
    key, convert = entry
    if key and (text := only_shell_knows(value)):
        raise LeftToUserError(f"{text}: set {key}")
    if callable(convert):
        value = convert(value) if isinstance(convert, type) else convert(value, source)
    elif convert is not None:
        if isinstance(value, list | dict) or value not in convert:
            raise LeftToUserError(f"{value} has no counterpart; {key} knows {', '.join(map(str, convert.values()))}")
        value = convert[value]
    if value is None:
        return {}
    return value if isinstance(value, dict) else {key: value}
