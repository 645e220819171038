"""What becomes of the keys of another stack's config: rules by key, and their application to a file."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Values = dict[str, Any]  # ours, by "section.key"


class NoCounterpartError(Exception):
    """This value cannot be carried over; the text says what to do."""


class Source:
    """The keys of a foreign config, flat: what the file says, else that stack's own default."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.given = dict(given)
        self.defaults = dict(defaults)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` where neither the file nor the stack has one."""
        for values in (self.given, self.defaults):
            if values.get(name) is not None:
                return values[name]
        return default


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of a key.

    Attributes:
        translate: (value, source) -> our keys with their values; None where the key has no counterpart.
        text: why a key without counterpart does not matter; or, with ``is_for_user``, what is left to do.
        is_for_user: the user has something to do, whether or not there is a counterpart.
    """

    translate: Callable[[Any, Source], Values] | None = None
    text: str = ""
    is_for_user: bool = False


def to(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The key is our ``name``, its value converted."""
    return Rule(lambda value, source: {name: convert(value)})


def choice(name: str, table: Mapping[Any, Any]) -> Rule:
    """The key is our ``name``; the table has its values."""

    def convert(value: Any) -> Any:
        if value not in table:
            raise NoCounterpartError(f"{value} has no counterpart; {name} knows {', '.join(map(str, table.values()))}")
        return table[value]

    return to(name, convert)


def into(translate: Callable[[Any, Source], Values]) -> Rule:
    """The key, perhaps together with others, gives several of ours."""
    return Rule(translate)


def without(text: str) -> Rule:
    """The key has no counterpart, and needs none: the text says why."""
    return Rule(text=text)


def by_hand(text: str, values: Values | None = None) -> Rule:
    """The user has something to do; ``values`` are what stands there until then."""
    return Rule(values and (lambda value, source: dict(values)), text, is_for_user=True)


def each(prefix: str, names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several keys, whose names are separated by spaces."""
    return {prefix + name: rule for name in names.split()}


@dataclasses.dataclass
class Translation:
    """A config of ours, and what is to be said of each key of theirs.

    Attributes:
        values: our keys.
        origins: our key -> their keys that gave it.
        dropped: their key -> why it has no counterpart.
        for_user: their key -> what the user has to do.
        unknown: their keys that no rule knows.
    """

    values: Values = dataclasses.field(default_factory=dict)
    origins: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    for_user: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: list[str] = dataclasses.field(default_factory=list)


def translate(source: Source, rules: Mapping[str, Rule]) -> Translation:
    """Apply the rules to every key of the file, and to the stack's defaults of keys that the file leaves out.

    Args:
        source: flat keys.
        rules: by key; the key may have ``*``. The first that fits counts.
    """
    result = Translation()
    for name, value in _entries(source):
        is_given = name in source.given
        rule = _find(rules, name)
        if rule is None:
            result.unknown.append(name)
        elif rule.translate is None:
            if is_given:
                (result.for_user if rule.is_for_user else result.dropped)[name] = rule.text
        else:
            try:
                values = rule.translate(value, source)
            except NoCounterpartError as error:
                result.for_user[name] = str(error)
                continue
            except (TypeError, ValueError, ZeroDivisionError, AttributeError):
                result.for_user[name] = f"{value!r} is not understood: set it by hand"
                continue
            label = name if is_given else f"{name} (default)"
            for key, one in values.items():
                result.values[key] = one
                result.origins.setdefault(key, []).append(label)
            if rule.is_for_user and is_given:
                result.for_user[name] = rule.text
            elif not values and is_given:
                result.dropped[name] = f"{value!r} asks for nothing here"
    return result


def _entries(source: Source) -> Iterator[tuple[str, Any]]:
    """Defaults first: what the file says comes later and wins where two keys give one of ours."""
    for name, value in source.defaults.items():
        if name not in source.given:
            yield name, value
    for name, value in source.given.items():
        if value is None and name in source.defaults:
            yield name, source.defaults[name]
        elif value is not None:
            yield name, value


def _find(rules: Mapping[str, Rule], name: str) -> Rule | None:
    if name in rules:
        return rules[name]
    return next((rule for pattern, rule in rules.items() if fnmatch.fnmatchcase(name, pattern)), None)
