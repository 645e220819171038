"""YAML and ``key=value`` overrides into frozen dataclasses, with one-line errors."""

import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import json
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mindrlhf.config.keys import MAX_INTEGER, MAX_NUMBER, MAX_SECONDS, MIN_NUMBER, REMOVED, choice_hint
from mindrlhf.errors import Mistakes, UserError
from mindrlhf.hub.cache import local_directory
from mindrlhf.system.files import write_file
from mindrlhf.system.strict_yaml import YAML_ERRORS, load_yaml

Config = TypeVar("Config")

_MAX_PLAIN_DEPTH, _MAX_PLAIN_NUMBER = 2, 1 << 53  # of a mapping of text to anything
_ENTRIES = {str: "text", float: "numbers", Any: "anything"}


def read_yaml(path: str | Path) -> dict:
    """Read a YAML mapping.

    Raises:
        UserError: the file is missing, is not YAML, or is not a mapping.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"config file '{path}' is a directory: name the YAML file in it")
    try:
        with path.open(encoding="utf-8") as file:
            content = load_yaml(file)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text at byte {error.start}: save it as UTF-8") from None
    except FileNotFoundError:
        raise UserError(f"config file '{path}' does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except YAML_ERRORS as error:
        hint = ": indent with spaces" if "'\\t'" in str(error) else ""
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}{hint}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, but a config is a mapping of sections")
    return content


@dataclasses.dataclass(frozen=True)
class Reading:
    """A config as far as it could be read, and what is wrong with its keys."""

    config: Any
    given: frozenset[str]  # dotted names of the keys that were given
    mistakes: Mistakes

    @property
    def changed(self) -> frozenset[str]:
        """The given keys whose value is not the default: what a run writes to its config.yaml holds every key."""
        changed = set()
        for dotted, field, _ in dotted_keys(type(self.config)):
            section, _, name = dotted.rpartition(".")
            owner = getattr(self.config, section) if section else self.config
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            if dotted in self.given and getattr(owner, name) != default:
                changed.add(dotted)
        return frozenset(changed)


def read(cls: type, content: dict, overrides: Iterable[str] = ()) -> Reading:
    """Apply ``section.key=value`` overrides to the content of a YAML file and read a ``cls`` out of it.

    Relative paths in the file stay relative to the working directory, as on the command line.

    Returns:
        Every mistake of a single key is noted; such a key has its default, or "" when it is required.
    """
    mistakes, given = Mistakes(), set()
    content = copy.deepcopy(content)
    types_of = {dotted: hint for dotted, _, hint in dotted_keys(cls)}
    for override in overrides:
        mistakes.check(_apply_override, content, override, types_of)
    config = _with_defaults_of_device(_build(cls, content, "", given, mistakes), given)
    return Reading(config, frozenset(given), mistakes)


def write_config(config: Any, output_dir: Path) -> None:
    """Write the whole config, defaults included, to ``config.yaml`` in ``output_dir``."""
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists
    write_file(output_dir / "config.yaml", yaml.safe_dump(plain, sort_keys=False))


def _apply_override(content: dict, override: str, types_of: Mapping[str, Any]) -> None:
    """Set one key in ``content``; nothing behind the sign is the empty text, list or mapping, by its type."""
    dotted, separator, text = override.partition("=")
    if override == "=":
        raise UserError("'=' stands alone: no spaces around it, as in section.key=value")
    if not separator or not dotted.strip():
        near = nearest_key(dotted.strip().rpartition(".")[2])
        hint = f"; did you mean {near}=VALUE?" if near else ""
        raise UserError(f"override {_quoted(override)} is not of the form section.key=value{hint}")
    try:
        value = load_yaml(text)
    except UserError as error:
        raise UserError(f"override {_quoted(override)}: {error}") from None
    except YAML_ERRORS:
        raise UserError(f"override {_quoted(override)}: the value is not valid YAML; quote it") from None
    name = dotted.strip()
    *parents, last = name.split(".")
    if value is None and not text.strip():
        value = _empty(types_of.get(name, types_of.get(".".join(parents))), is_entry=name not in types_of)
    target = content
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise UserError(f"override {_quoted(override)}: '{parent}' is a value, not a section")
    target[last] = value


def _empty(hint: Any, *, is_entry: bool) -> str | dict | None:
    """Return what an empty text means for a key of a type, or for an entry of a mapping."""
    if typing.get_origin(hint) is dict:
        return "" if is_entry else {}
    return "" if hint is str or typing.get_origin(hint) is tuple else None


def _build(cls: type[Config], content: Any, where: str, given: set[str], mistakes: Mistakes) -> Config:
    if not isinstance(content, Mapping):
        message = f"'{where.rstrip('.')}' must be a section (a mapping of keys), not {_shown(content)}"
        mistakes.add(message, *(dotted for dotted, _, _ in dotted_keys(cls, where)))
        content = {}
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    unknown = [name for name in content if name not in fields]
    for name in unknown:
        mistakes.add(*_unknown_key(cls, where, _quoted(name)[1:-1] if isinstance(name, str) else _shown(name)))
    for name, value in content.items():
        if name not in fields:
            continue
        field, dotted = fields[name], f"{where}{name}"
        if "section" in field.metadata:
            section = {} if value is None else value
            values[name] = _build(field.metadata["section"], section, f"{dotted}.", given, mistakes)
            continue
        try:
            values[name] = _convert(dotted, value, hints[name], field.metadata)
            given.add(dotted)
        except UserError as error:
            mistakes.add(str(error), dotted)
    for name, field in fields.items():
        if name in values:
            continue
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if name not in content:
                mistakes.add(f"key '{where}{name}' is required: {field.metadata['doc']}", f"{where}{name}")
            values[name] = ""  # every required key is text
        elif "section" in field.metadata:
            values[name] = _build(field.metadata["section"], {}, f"{where}{name}.", given, mistakes)
    return cls(**values)


def _with_defaults_of_device(config: Config, given: set[str]) -> Config:
    """Give keys that were left out the default that they have on Ascend, where the run is there."""
    if getattr(getattr(config, "run", None), "device", "") != "ascend":
        return config
    values = collections.defaultdict(dict)
    for dotted, field, _ in dotted_keys(type(config)):
        if field.metadata.get("on_ascend") is not None and dotted not in given:
            section, _, name = dotted.partition(".")
            values[section][name] = field.metadata["on_ascend"]
    sections = {name: dataclasses.replace(getattr(config, name), **new) for name, new in values.items()}
    return dataclasses.replace(config, **sections)


def dotted_keys(cls: type, prefix: str = "") -> Iterable[tuple[str, dataclasses.Field, Any]]:
    """Yield (dotted name, field, type) of every leaf key below ``cls``."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "section" in field.metadata:
            yield from dotted_keys(field.metadata["section"], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, hints[field.name]


_ROOTS: list[type] = []


def root_config(cls: type) -> type:
    """Class decorator: mark a whole run's config, so that misplaced keys can be traced to their place."""
    _ROOTS.append(cls)
    return cls


def _place(where: str) -> str:
    return f"section '{where.rstrip('.')}'" if where else "the top level"


def _unknown_key(cls: type, where: str, name: str) -> tuple[str, ...]:
    """Return the message and, where one is near, the dotted name of the key that was meant."""
    if f"{where}{name}" in REMOVED:
        return (f"key '{where}{name}' was removed: {REMOVED[where + name]}",)
    here = [field.name for field in dataclasses.fields(cls)]
    message = f"unknown key '{where}{name}'"
    if near := _nearest(name, here):
        return f"{message}; did you mean '{where}{near}'?", f"{where}{near}"
    if dotted := _places_of_keys().get(name):
        return f"{message}; did you mean '{dotted}'? (it belongs to another section)", dotted
    if near := nearest_key(name):
        form = near if near != name else near.replace(".", ": {") + ": ..." + "}" * near.count(".")
        return f"{message}; did you mean '{form}'?", near
    return (f"{message}; keys of {_place(where)}: {', '.join(here)}",)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    # lr: start_lr; policy_loss: loss
    ends = [one for one in known if one.endswith(f"_{name}") or name.endswith(f"_{one}")]
    return next(iter(difflib.get_close_matches(name, known, n=1) or ends), None)


@functools.cache
def _places_of_keys() -> dict[str, str]:
    """The keys of every kind of run: their dotted name by its last part, the first of those that share it."""
    places: dict[str, str] = {}
    for dotted, _, _ in (key for root in _ROOTS for key in dotted_keys(root)):
        places.setdefault(dotted.rpartition(".")[2], dotted)
    return places


def nearest_key(name: str) -> str | None:
    """Return the dotted name of the key of any kind of run whose last part is nearest to ``name``, if any is near."""
    places = _places_of_keys()
    return places.get(_nearest(name, places))


def type_name(hint: Any) -> str:
    """Return the words by which messages and docs call a type, such as 'integer' or 'list of integers'."""
    names = {int: "integer", float: "number", str: "text", bool: "true/false"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}s"
    if origin is dict:
        return f"mapping of text to {_ENTRIES[arguments[1]]}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if item is type(None) else type_name(item) for item in arguments)
    return names.get(hint, str(hint))


def _convert(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        hint = next(item for item in arguments if item is not type(None))
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if isinstance(value, str):  # "a,b" as the command-line flags of the tutorial write it
            value = [_parse_item(name, item) for item in value.split(",") if item.strip()]
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_convert(f"{name}[{index}]", item, arguments[0], metadata) for index, item in enumerate(items))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"'{name}' must be a mapping, not {_shown(value)}")
        if arguments[1] is Any:
            return _plain(name, value)
        if arguments[1] is not str:
            return {_text(name, item): _number(f"{name}.{item}", setting) for item, setting in value.items()}
        return {_text(name, item): _located(name, _text(name, setting), metadata) for item, setting in value.items()}
    value = _scalar(name, value, hint, metadata)
    if hint is str:
        _check_text(name, value)
        value = _located(name, value, metadata)
    _check_range(name, value, metadata)
    return value


def _located(name: str, value: str, metadata: Mapping[str, Any]) -> str:
    return local_directory(value) if metadata["is_model"] else value


def _number(name: str, value: Any) -> float | bool:
    """Return an entry of a mapping of text to numbers, which may be true or false."""
    if isinstance(value, str):  # as 1e-6 is read
        with contextlib.suppress(ValueError):
            value = float(value)
    if not isinstance(value, (int, float)) or not abs(value) <= MAX_NUMBER:
        raise UserError(f"'{name}' must be a number, or true or false, not {_shown(value)}")
    return value


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """Return what JSON can hold as well: scalars, and lists and mappings of them, not deeply nested."""
    if isinstance(value, (Mapping, list)):
        if depth > _MAX_PLAIN_DEPTH:
            raise UserError(f"'{name}' has mappings more than {_MAX_PLAIN_DEPTH} deep")
        if isinstance(value, list):
            return [_plain(name, item, depth + 1) for item in value]
        return {_text(name, key): _plain(f"{name}.{key}", item, depth + 1) for key, item in value.items()}
    if isinstance(value, (bool, type(None))):
        return value
    if isinstance(value, (int, float)):
        if not abs(value) <= _MAX_PLAIN_NUMBER:
            raise UserError(f"'{name}' must be at most 2**53, not {_shown(value)}")
        return value
    return _text(name, value)


def _parse_item(name: str, text: str) -> Any:
    try:
        return load_yaml(text)
    except UserError as error:
        raise UserError(f"'{name}' has the item {_shown(text)}: {error}") from None
    except YAML_ERRORS:
        raise UserError(f"'{name}' has the item {_shown(text)}, which is not valid YAML; quote it") from None


def _text(name: str, value: Any) -> str:
    """Return one side of a mapping of text to text, such as the environment of a process."""
    if isinstance(value, (list, dict)):
        raise UserError(f"'{name}' must be a mapping of text to text, but holds {_shown(value)}")
    try:
        text = str(value)
    except ValueError:
        raise UserError(f"'{name}' holds {_shown(value)}: quote it") from None
    _check_text(name, text)
    return text


def _quoted(text: str) -> str:
    return f"'{text}'" if len(text) <= _SHORT.maxstring and text.isprintable() else _shown(text)


def _shown(value: Any) -> str:
    """A value as messages show it: cut short, because YAML aliases can make a few bytes a value of gigabytes."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "an integer of thousands of digits"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 2


def _scalar(name: str, value: Any, hint: type, metadata: Mapping[str, Any]) -> Any:
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-6 (no dot) as text; every user writes it so.
        with contextlib.suppress(ValueError):
            value = float(value)
    if hint in (int, float) and isinstance(value, (int, float)):
        _check_size_of_number(name, value, hint, metadata)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = _text(name, value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        words = type_name(hint)
        more = f" ({metadata['doc']})" if isinstance(value, list) and metadata.get("doc") else ""
        raise UserError(f"'{name}' must be {'an' if words[0] in 'aeiou' else 'a'} {words}, not {_shown(value)}{more}")
    return value


def _check_size_of_number(name: str, value: float, hint: type, metadata: Mapping[str, Any]) -> None:
    """Refuse what no key takes; closer bounds are looked at later."""
    most = MAX_INTEGER if hint is int else MAX_SECONDS if name.endswith("_s") else MAX_NUMBER
    if value != value and metadata["minimum"] is not None:
        return  # which says so
    if not -most <= value <= most:
        low, high = (
            declared if declared is not None else default
            for declared, default in ((metadata["minimum"], -most), (metadata["maximum"], most))
        )
        raise UserError(f"'{name}' is {_shown(value)}, but must be a number from {low:.10g} to {high:.10g}")
    if 0 < abs(value) < MIN_NUMBER:
        raise UserError(f"'{name}' is {value}, but numbers other than 0 must be {MIN_NUMBER:g} at least: give 0")


def _check_text(name: str, value: str) -> None:
    if "\0" in value:
        raise UserError(f"'{name}' is {_shown(value)}, with a NUL character: remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"'{name}' is {_shown(value)}: {value[error.start]!r} is no character; remove it") from None


def _check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    choices, minimum, maximum = metadata["choices"], metadata["minimum"], metadata["maximum"]
    if choices and value not in choices:
        hint = choice_hint(value, choices)
        raise UserError(f"'{name}' is {_shown(value)}, but must be one of {', '.join(map(str, choices))}{hint}")
    if minimum is not None and isinstance(value, (int, float)):
        below = not (value > minimum if metadata["exclusive_minimum"] else value >= minimum)
        if below:
            bound = "greater than" if metadata["exclusive_minimum"] else "at least"
            raise UserError(f"'{name}' is {value}, but must be {bound} {minimum:g}")
    if maximum is not None and isinstance(value, (int, float)) and not value <= maximum:
        raise UserError(f"'{name}' is {value}, but must be at most {maximum:g}")
