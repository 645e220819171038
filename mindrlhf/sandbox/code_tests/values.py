"""Python values as data: what passes between a program under test and whoever judges it. Standard library only.

Scalars and lists are themselves in JSON; everything else is an object with one key that names its type. Subclasses
become the type they inherit from, so that nothing a program has defined, such as an ``__eq__``, comes out with a value.
What is no data at all (a class, a generator, an instance of the program's own class) becomes a number, by which the
side that has it can be asked about it.
"""

import collections
import decimal
import fractions

# Longer whole numbers are not written in decimal: Python limits that, and it takes quadratic time.
_MAX_DECIMAL_BITS = 10_000
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}


def encode(value, as_object):
    """Return ``value`` in a form that JSON can hold; ``as_object`` encodes what is no data."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if number.bit_length() <= _MAX_DECIMAL_BITS else {"int": hex(number)}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if -1e308 < number < 1e308 else {"float": float.__repr__(number)}
    if isinstance(value, list):
        return [encode(item, as_object) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encode(key, as_object), encode(item, as_object)] for key, item in dict.items(value)]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, as_object) for item in kind.__iter__(value)]}
    return _encode_rare(value, as_object)


def _encode_rare(value, as_object):
    if isinstance(value, (bytes, bytearray)):
        return {"bytes" if isinstance(value, bytes) else "bytearray": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if isinstance(value, fractions.Fraction):
        return {"fraction": [hex(value.numerator), hex(value.denominator)]}
    if isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    return as_object(value)


def decode(data, as_object):
    """Return the value that ``data`` stands for; ``as_object`` gets the type's name and content of what is no data.

    Raises:
        ValueError, TypeError: it stands for none.
    """
    if isinstance(data, list):
        return [decode(item, as_object) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, as_object) for item in content)
    if kind == "dict":
        return {decode(key, as_object): decode(item, as_object) for key, item in content}
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content)
    if kind == "complex":
        return complex(*map(float, content))
    if kind == "fraction":
        return fractions.Fraction(*(int(part, 16) for part in content))
    if kind == "decimal":
        return decimal.Decimal(content)
    if kind == "range":
        return range(*content)
    return as_object(kind, content)
