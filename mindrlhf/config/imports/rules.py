"""What becomes of the keys of another stack's config: rules by key, and their application to a file."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Values = dict[str, Any]  # ours, by "section.key"


class NoCounterpartError(Exception):
    """This value cannot be carried over, or only ``values`` of it; the text says what to do."""

    def __init__(self, text: str, values: Values | None = None):
        super().__init__(text)
        self.values = values or {}


class Source:
    """The keys of a foreign config, flat: what the file says, else that stack's own default.

    Attributes:
        given: what the file says.
        defaults: what that stack does where it says nothing.
        unknown: keys whose value the file does not have, and a text that says who knows it.

    Args:
        aliases: earlier names of keys, which are read as the later ones.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        unknown: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ):
        aliases = aliases or {}
        self.given = {aliases.get(name, name): value for name, value in given.items()}
        self.unknown = {aliases.get(name, name): part for name, part in (unknown or {}).items()}
        self._written = {aliases[name]: name for name in [*given, *(unknown or {})] if name in aliases}
        self.defaults = {name: value for name, value in defaults.items() if name not in self.unknown}

    def shown(self, name: str) -> str:
        """Return a key as the file writes it."""
        return self._written.get(name, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key; ``default`` where neither the file nor the stack has one.

        Raises:
            NoCounterpartError: only the shell knows it.
        """
        if name in self.unknown:
            raise NoCounterpartError(f"goes with {name}, and {self.unknown[name]}")
        for values in (self.given, self.defaults):
            if values.get(name) is not None:
                return values[name]
        return default


def only_shell_knows(part: str) -> str:
    return f"only the shell knows {part}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of a key.

    Attributes:
        translate: (value, source) -> our keys with their values; None where the key has no counterpart.
        text: why a key without counterpart does not matter; or, with ``is_for_user``, what is left to do.
        is_for_user: the user has something to do, whether or not there is a counterpart.
        targets: all of our keys that ``translate`` may give.
        is_by_presence: that the key is there says all; its value is not read.
    """

    translate: Callable[[Any, Source], Values] | None = None
    text: str = ""
    is_for_user: bool = False
    targets: tuple[str, ...] = ()
    is_by_presence: bool = False


def to(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The key is our ``name``, its value converted."""
    return Rule(lambda value, source: {name: convert(value)}, targets=(name,))


def choice(name: str, table: Mapping[Any, Any]) -> Rule:
    """The key is our ``name``; the table has its values."""

    def convert(value: Any) -> Any:
        if isinstance(value, list | dict) or value not in table:
            raise NoCounterpartError(f"{value} has no counterpart; {name} knows {', '.join(map(str, table.values()))}")
        return table[value]

    return to(name, convert)


def into(translate: Callable[[Any, Source], Values], *targets: str) -> Rule:
    """The key, perhaps together with others, gives some of ours, ``targets``."""
    return Rule(translate, targets=targets)


def where_given(values: Values) -> Rule:
    """Where the key is given, whatever its value, ours are ``values``."""
    return Rule(lambda value, source: dict(values), targets=tuple(values), is_by_presence=True)


def without(text: str) -> Rule:
    """The key has no counterpart, and needs none: the text says why."""
    return Rule(text=text)


def by_hand(text: str, values: Values | None = None) -> Rule:
    """The user has something to do; ``values`` are what stands there until then."""
    return Rule(values and (lambda value, source: dict(values)), text, True, tuple(values or ()))


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
        rules: by key; the key may have ``*``. The one with the most letters of its own counts.
    """
    result = Translation()
    for name, value in _entries(source):
        rule = find(rules, name)
        if rule is None:
            result.unknown.append(source.shown(name))
        else:
            _apply(rule, name, value, source, result)
    for name, part in source.unknown.items():
        rule = find(rules, name)
        if rule is not None and rule.is_by_presence:
            _apply(rule, name, None, source, result)
        elif rule is not None and rule.translate is None and not rule.is_for_user:
            result.dropped[source.shown(name)] = rule.text
        else:
            ours = " and ".join(rule.targets[:2]) if rule else ""
            result.for_user[source.shown(name)] = part + (f": set {ours}" if ours else "")
    return result


def _apply(rule: Rule, name: str, value: Any, source: Source, result: Translation) -> None:
    is_given, shown = name in source.given or name in source.unknown, source.shown(name)
    if rule.translate is None:
        if is_given:
            (result.for_user if rule.is_for_user else result.dropped)[shown] = rule.text
        return
    try:
        values = rule.translate(value, source)
    except NoCounterpartError as error:
        values = error.values
        result.for_user[shown] = str(error)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
        ours = " and ".join(rule.targets[:2]) or "it"
        result.for_user[shown] = f"{value!r} is not understood: set {ours} by hand"
        return
    label = shown if is_given else f"{name} (default)"
    for key, one in values.items():
        result.values[key] = one
        result.origins.setdefault(key, []).append(label)
    if rule.is_for_user and is_given:
        result.for_user[shown] = rule.text
    elif not values and is_given and shown not in result.for_user:
        result.dropped[shown] = f"{value!r} asks for nothing here"


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


def find(rules: Mapping[str, Rule], name: str) -> Rule | None:
    """Return the rule of a key: its own, else that of the pattern with the most letters beside the ``*``."""
    if name in rules:
        return rules[name]
    patterns = [pattern for pattern in rules if "*" in pattern and fnmatch.fnmatchcase(name, pattern)]
    return rules[max(patterns, key=lambda pattern: len(pattern.replace("*", "")))] if patterns else None
