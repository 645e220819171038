"""What travels between rank 0 and the ranks: frozen dataclasses, as JSON values and named NumPy arrays on the wire.

A message is a mapping of names to JSON values, arrays and records. Nothing is guessed on arrival: a record that is
unknown, a field too many or too few, a value of another type than its field's, an array that nobody reads are errors.

Where a model is sharded, several ranks compute one replica's result, and most hold only a part of it: each field of
a result says which of the ranks' values counts, or how they are put together.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mindrlhf.system.wire import ProtocolError

# An object of the JSON text with this one key stands for an array, a record or a mapping.
_ARRAY, _RECORD, _MAPPING = "array", "record", "mapping"
_RECORDS: dict[str, type] = {}
_RULE = "merged by"

Result = TypeVar("Result")


def record(cls: type) -> type:
    """Let a frozen dataclass travel, under its name.

    Its fields are annotated as ``np.ndarray``, int, float, bool, str, ``Any`` (a JSON value), another record,
    ``tuple[X, ...]`` or ``dict[str, X]``.
    """
    assert cls.__dataclass_params__.frozen, f"{cls.__name__} can be changed"
    assert _RECORDS.setdefault(cls.__name__, cls) is cls, f"there are two records called {cls.__name__}"
    return cls


def merged_by(rule: Any, **options: Any) -> Any:
    """Return a dataclass field whose values ``rule`` merges: a function of the list of the ranks' values."""
    return dataclasses.field(metadata={_RULE: rule}, **options)


def result(cls: type) -> type:
    """Make a class a frozen dataclass that a rank may return.

    Raises:
        TypeError: a field does not say how it is merged.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    for one in dataclasses.fields(cls):
        if _RULE not in one.metadata:
            raise TypeError(
                f"{cls.__name__}.{one.name} does not say how the results of a replica's ranks are merged: give it "
                "merged_by(...)"
            )
    return record(cls)


def merge(results: Sequence[Result]) -> Result:
    """Return the result of a replica from those of its ranks, in order.

    None if they returned nothing. Of what is no record, such as a list of arrays, the last rank's counts.
    """
    kinds = {list if isinstance(one, tuple) else type(one) for one in results}  # a tuple of another rank is a list
    assert len(kinds) == 1, f"the ranks of a replica returned different things: {sorted(map(str, kinds))}"
    if kinds <= {list, type(None)}:
        return last(results)
    first = results[0]
    values = {
        one.name: one.metadata[_RULE]([getattr(each, one.name) for each in results])
        for one in dataclasses.fields(first)
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


def encode(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return JSON values and arrays by name, the inverse of :func:`decode`.

    Raises:
        TypeError: a value that cannot travel, or that is not of the type of its field.
    """
    arrays: dict[str, np.ndarray] = {}
    return {name: _encode(value, name, arrays) for name, value in values.items()}, arrays


def decode(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what :func:`encode` was given; a bare tuple arrives as a list.

    Raises:
        ProtocolError: the message does not hold exactly what its records have.
    """
    unread = dict(arrays)
    try:
        decoded = {name: _decode(value, unread) for name, value in values.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ProtocolError(f"a message cannot be read: {error}") from error
    if unread:
        raise ProtocolError(f"a message cannot be read: nothing refers to its array {min(unread)!r}")
    return decoded


def _encode(value: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        name = f"{len(arrays)}:{path}"  # paths alone may be equal: names may have dots
        arrays[name] = value
        return {_ARRAY: name}
    if type(value) in _RECORDS.values():
        encoded = {}
        for name, kind in _kinds(type(value)).items():
            where = f"{path}.{name}"
            encoded[name] = _encode(_fit(getattr(value, name), kind, where), where, arrays)
        return {_RECORD: [type(value).__name__, encoded]}
    if isinstance(value, (list, tuple)):
        return [_encode(one, f"{path}.{index}", arrays) for index, one in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {_MAPPING: {name: _encode(one, f"{path}.{name}", arrays) for name, one in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{path}: {type(value).__name__} cannot travel between ranks")


def _decode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(one, arrays) for one in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items() if len(value) == 1 else ((None, None),)
    if tag == _ARRAY:
        return arrays.pop(content)
    if tag == _MAPPING:
        return {name: _decode(one, arrays) for name, one in content.items()}
    if tag != _RECORD:
        raise TypeError(f"an object with the keys {sorted(value)}")
    name, encoded = content
    if name not in _RECORDS:
        raise TypeError(f"there is no record {name!r}")
    kinds = _kinds(_RECORDS[name])
    if wrong := sorted(kinds.keys() ^ encoded.keys()):
        raise TypeError(f"{name} {'lacks' if wrong[0] in kinds else 'has no field'} {wrong[0]!r}")
    fields = {field: _decode(one, arrays) for field, one in encoded.items()}
    return _RECORDS[name](**{field: _fit(one, kinds[field], f"{name}.{field}") for field, one in fields.items()})


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
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_fit(one, arguments[0], f"{where}.{index}") for index, one in enumerate(value))
    if origin is dict:
        if isinstance(value, Mapping):
            return {name: _fit(one, arguments[1], f"{where}.{name}") for name, one in value.items()}
    elif origin is None:
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        if kind is int and isinstance(value, bool):
            raise TypeError(f"{where} is {value!r}, not {kind.__name__}")
        if isinstance(value, kind):
            return value
    raise TypeError(f"{where} is of type {type(value).__name__}, not {getattr(kind, '__name__', kind)}")
