"""Dataclasses as JSON values and named NumPy arrays: messages between ranks, and the state in checkpoints.

Nothing is guessed on reading: a record that is unknown, a field too many or too few, a value of another type than its
field's, an array that nobody reads are errors.

Where a model is sharded, several ranks compute one replica's result, and most hold only a part of it: each field of
a result says which of the ranks' values counts, or how they are merged.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mindrlhf.system.wire import ProtocolError

# An object of the JSON text with this one key stands for an array, bytes, a record, a mapping with one such key, or a
# list of many whole numbers.
_ARRAY, _BYTES, _RECORD, _MAPPING, _INTEGERS = "$array", "$bytes", "$record", "$mapping", "$integers"
_TAGS = {_ARRAY, _BYTES, _RECORD, _MAPPING, _INTEGERS}
_MANY = 64  # whole numbers from which on a list travels as an array: token ids would be a long text
_RECORDS: dict[str, type] = {}
_RULE = "merged by"
_LARGEST = 1 << 63

Result = TypeVar("Result")


def record(cls: type) -> type:
    """Let a dataclass be encoded, under its name.

    Its fields are annotated as ``np.ndarray``, bytes, int, float, bool, str, ``Any`` (a JSON value), another record,
    or ``tuple``, ``list``, ``dict``, ``Mapping`` and ``X | None`` of these.
    """
    known = _RECORDS.setdefault(cls.__name__, cls)  # no part of the assertion, which PYTHONOPTIMIZE leaves out
    assert known is cls, f"there are two records called {cls.__name__}"
    return cls


def encode(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return JSON values and arrays by name, the inverse of :func:`decode`; an array that occurs twice is there once.

    Raises:
        TypeError: a value that cannot be encoded, or that is not of the type of its field.
    """
    encoder = _Encoder()
    return {name: encoder.encode(value, name) for name, value in values.items()}, encoder.arrays


def decode(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what :func:`encode` was given; a bare tuple comes back as a list.

    Raises:
        ProtocolError: the values do not hold exactly what their records have.
    """
    unread = set(arrays)

    def array_of(name: str) -> np.ndarray:
        unread.discard(name)
        return arrays[name]

    try:
        decoded = {name: _decode(value, array_of) for name, value in values.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error
    if unread:
        raise ProtocolError(f"a message cannot be read: nothing refers to its array {min(unread)!r}")
    return decoded


class _Encoder:
    """The arrays found so far."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._names: dict[int, str] = {}  # by the identity of arrays that the encoded value refers to

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray):
            return {_ARRAY: self._name(value, path)}
        if isinstance(value, bytes):
            return {_BYTES: self._name(np.frombuffer(value, np.uint8), path)}
        if type(value) in _RECORDS.values():
            fields = {}
            for name, kind in _kinds(type(value)).items():
                where = f"{path}.{name}"
                fields[name] = self.encode(_fit(getattr(value, name), kind, where), where)
            return {_RECORD: [type(value).__name__, fields]}
        if isinstance(value, (list, tuple)):
            if len(value) >= _MANY and _are_int64(value):
                return {_INTEGERS: self._name(np.array(value, np.int64), path)}
            return [self.encode(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            encoded = {name: self.encode(item, f"{path}.{name}") for name, item in value.items()}
            return {_MAPPING: encoded} if len(value) == 1 and value.keys() <= _TAGS else encoded
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"{path}: {type(value).__name__} cannot be encoded")

    def _name(self, array: np.ndarray, path: str) -> str:
        name = self._names.setdefault(id(array), f"{len(self.arrays)}:{path}")  # paths alone may be equal
        self.arrays[name] = array
        return name


def _are_int64(values: Sequence[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= -_LARGEST and max(values) < _LARGEST


def _decode(value: Any, array_of: Callable[[str], np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(item, array_of) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not value.keys() <= _TAGS:
        return {name: _decode(item, array_of) for name, item in value.items()}
    ((tag, content),) = value.items()
    if tag == _ARRAY:
        return array_of(content)
    if tag == _BYTES:
        return array_of(content).tobytes()
    if tag == _INTEGERS:
        return array_of(content).tolist()
    if tag == _MAPPING:
        return {name: _decode(item, array_of) for name, item in content.items()}
    name, encoded = content
    if name not in _RECORDS:
        raise TypeError(f"there is no record {name!r}")
    kinds = _kinds(_RECORDS[name])
    if wrong := sorted(kinds.keys() ^ encoded.keys()):
        raise TypeError(f"{name} {'lacks' if wrong[0] in kinds else 'has no field'} {wrong[0]!r}")
    fields = {field: _decode(item, array_of) for field, item in encoded.items()}
    return _RECORDS[name](**{field: _fit(item, kinds[field], f"{name}.{field}") for field, item in fields.items()})


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    """Return the types of a record's fields by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _fit(value: Any, kind: Any, where: str) -> Any:
    """Return a field's value, a list as the tuple that it was.

    Raises:
        TypeError: it is of another type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _fit(value, arguments[0], where)
    if origin is tuple and isinstance(value, (list, tuple)):
        if arguments == (int, ...) and set(map(type, value)) <= {int}:
            return tuple(value)
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_fit(*pair, f"{where}.{index}") for index, pair in enumerate(zip(value, kinds, strict=True)))
    if origin is list and isinstance(value, list):
        return [_fit(item, arguments[0], f"{where}.{index}") for index, item in enumerate(value)]
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {name: _fit(item, arguments[1], f"{where}.{name}") for name, item in value.items()}
    if origin is None:
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        if kind is int and isinstance(value, bool):
            raise TypeError(f"{where} is {value!r}, not {kind.__name__}")
        if isinstance(value, kind):
            return value
    raise TypeError(f"{where} is of type {type(value).__name__}, not {getattr(kind, '__name__', kind)}")


def merged_by(rule: Any, **options: Any) -> Any:
    """Return a dataclass field whose values ``rule`` merges: a function of the list of the ranks' values."""
    return dataclasses.field(metadata={_RULE: rule}, **options)


def result(cls: type) -> type:
    """Make a class a frozen dataclass that a rank may return.

    Raises:
        TypeError: a field does not say how it is merged.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    for field in dataclasses.fields(cls):
        if _RULE not in field.metadata:
            raise TypeError(
                f"{cls.__name__}.{field.name} does not say how the results of a replica's ranks are merged: give it "
                "merged_by(...)"
            )
    return record(cls)


def merge(results: Sequence[Result]) -> Result:
    """Return the result of a replica from those of its ranks, in order.

    None if they returned nothing. Of what is no record, such as a list of arrays, the last rank's counts.
    """
    # A tuple of another rank is a list.
    kinds = {list if isinstance(result, tuple) else type(result) for result in results}
    assert len(kinds) == 1, f"the ranks of a replica returned different things: {sorted(map(str, kinds))}"
    if kinds <= {list, type(None)}:
        return last(results)
    first = results[0]
    values = {
        field.name: field.metadata[_RULE]([getattr(result, field.name) for result in results])
        for field in dataclasses.fields(first)
    }
    return type(first)(**values)


def last(values: Sequence[Any]) -> Any:
    """Take the value of the last rank: in the last pipeline stage, where log-probabilities and losses are."""
    return values[-1]


def union(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put together what the ranks have by different names."""
    return {name: value for part in values for name, value in part.items()}


def join(values: Sequence[Mapping[str, list]]) -> dict[str, list]:
    """Put the lists together that the ranks have by the same names."""
    joined: dict[str, list] = {}
    for part in values:
        for name, entries in part.items():
            joined.setdefault(name, []).extend(entries)
    return joined
