# ruff: noqa: F821 -- values.py stands before this text when it runs
"""The judge's end of the socket to the program, and what stands for the program's names and objects in a test.

Both ways go lines of JSON; ``harness`` has the other end. Standard library only, after ``values.py``.
"""

import builtins
import collections
import copy
import decimal
import json
import math
import socket

MAX_LINE_BYTES = 64 << 20


class Untrusted(BaseException):
    """The test cannot tell a right program from one that cheats. Not an ``Exception``: tests catch those."""


class Gone(BaseException):
    """The program has ended, or does not keep to the protocol."""


class NotFinite(BaseException):
    """The program has returned a number with which comparisons go wrong; the test is failed."""


class Link:
    """Questions to the program."""

    def __init__(self):
        self._socket = socket.socket(fileno=3)
        self._lines, self._writing = self._socket.makefile("rb"), self._socket.makefile("wb")
        self._functions = []
        self.begin(frozenset())

    def begin(self, mentions):
        """Begin a test, whose words are ``mentions``."""
        self.allows_nan = bool(mentions & {"nan", "isnan", "nan_ok"})
        self.allows_inf = bool(mentions & {"inf", "infinity", "isinf", "isfinite"})
        self.names_stop = "stopiteration" in mentions
        self.writes_back = False
        self.trouble = None  # kept, since a test may catch everything

    def is_loaded(self):
        try:
            return self._receive().get("loaded") is True
        except Gone:
            return False

    def names(self, wanted):
        self._send({"names": wanted})
        names = self._receive().get("names")
        if not isinstance(names, dict):
            self.fail(Gone())
        return names

    def fail(self, trouble):
        self.trouble = self.trouble or trouble
        raise trouble

    def ask(self, kind, target, arguments=(), keywords=None):
        self._send(
            {
                "ask": kind,
                "of": target,
                "args": [encode(item, self._as_object) for item in arguments],
                "kwargs": {name: encode(item, self._as_object) for name, item in (keywords or {}).items()},
            }
        )
        while "call" in (reply := self._receive()):
            self._send({"call": self._call(reply)})
        if "raised" in reply:
            self._raise(reply, kind)
        try:
            value = self._decode(reply["value"])
            for index, data in (reply.get("changed") or {}).items() if self.writes_back else ():
                _replace(arguments[int(index)], self._decode(data))
        except (ValueError, TypeError, LookupError, RecursionError, AttributeError, ArithmeticError):
            self.fail(Gone())
        return value

    def check_number(self, value):
        """Return a value of the test; it is failed if that is not a number.

        Every comparison with what is none is false, so that ``not abs(float(f(x)) - y) > eps`` would hold.
        """
        if not self.allows_nan and _holds(value, _is_nan):
            self.fail(NotFinite())
        return value

    def _raise(self, reply, kind):
        """Raise what the program has raised: of a class of its name, derived from Python's own.

        StopIteration out of a call would end a ``map`` of the test in peace: as for generators (PEP 479), it is none.
        """
        names = reply["raised"] if isinstance(reply["raised"], list) else []
        bases = [getattr(builtins, name, None) for name in names if isinstance(name, str)]
        base = next((one for one in bases if isinstance(one, type) and issubclass(one, Exception)), None)
        if base is None:
            raise RuntimeError("the program ended its call")
        if issubclass(base, (StopIteration, StopAsyncIteration)) and kind != "next":
            if self.names_stop:
                self.fail(Untrusted("the test expects StopIteration of something else than next()"))
            raise RuntimeError("the program raised StopIteration")
        text, remote = str(reply.get("text", "")), None
        try:
            arguments = self._decode(reply["args"])
            remote = Remote(self, int(reply["object"]))
        except (KeyError, ValueError, TypeError, LookupError, RecursionError, AttributeError, ArithmeticError):
            arguments = [text]

        def get(error, name):
            if remote is None or name.startswith("__"):
                raise AttributeError(name)
            return getattr(remote, name)

        members = {"__str__": lambda error: text, "__getattr__": get, "__module__": "solution"}
        try:
            error = type(base)(names[0], (base,), members)(*arguments)
        except Exception:  # UnicodeDecodeError wants its five arguments
            error = RuntimeError(text)
        raise error

    def _call(self, request):
        """Call a function of the test that the program was given."""
        try:
            function = self._functions[request["call"]]
            value = function(*[self._decode(item) for item in request["args"]])
            return {"value": encode(value, self._as_object)}
        except Exception as error:
            return {"raised": type(error).__name__}

    def _decode(self, data):
        def as_object(kind, content):
            if kind != "object" or type(content) is not int:
                raise ValueError(kind)
            return Remote(self, content)

        value = decode(data, as_object)
        # Every comparison with what is not a number is false, so that `not abs(f(x) - y) > eps` would hold; the
        # difference of two infinities is not a number.
        if not self.allows_nan and _holds(value, _is_nan) or not self.allows_inf and _holds(value, _is_inf):
            self.fail(NotFinite())
        return value

    def _as_object(self, value):
        if isinstance(value, Remote):
            return {"object": object.__getattribute__(value, "_number")}
        if isinstance(value, Stub):
            return {"name": object.__getattribute__(value, "_name")}
        name = getattr(value, "__name__", "")
        if getattr(builtins, name, None) is value:
            return {"builtin": name}
        if callable(value) and not isinstance(value, type):
            self._functions.append(value)
            return {"function": len(self._functions) - 1}
        return self.fail(Untrusted(f"the test hands the program an object of its own class {type(value).__name__}"))

    def _send(self, message):
        try:
            self._writing.write(json.dumps(message).encode() + b"\n")
            self._writing.flush()
        except OSError:
            self.fail(Gone())

    def _receive(self):
        try:
            line = self._lines.readline(MAX_LINE_BYTES)
            reply = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            self.fail(Gone())
        return reply


class ConstantLink(Link):
    """A program that answers every question by one value, for tests of the tests.

    Args:
        value: the answer.
        kinds: of the names that the true program defines.
    """

    def __init__(self, value, kinds):
        self._value, self._kinds = value, kinds
        self.begin(frozenset())

    def names(self, wanted):
        return {name: self._kinds[name] for name in wanted if name in self._kinds}

    def ask(self, kind, target, arguments=(), keywords=None):
        return copy.deepcopy(self._value)


class Remote:
    """An object of the program's own. What it is asked is answered by data; it is never compared itself."""

    def __init__(self, link, number):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __getattribute__(self, name):
        if name == "__class__":
            return Remote
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name, value):
        _ask(self, "set", name, value)

    def __call__(self, *arguments, **keywords):
        link, number = object.__getattribute__(self, "_link"), object.__getattribute__(self, "_number")
        return link.ask("call", number, arguments, keywords)

    def __getitem__(self, index):
        return _ask(self, "item", index)

    def __iter__(self):
        return iter(_ask(self, "items"))

    def __contains__(self, item):
        # Looked for here: the program would learn what the test hopes for.
        return item in _ask(self, "items")

    def __next__(self):
        return _ask(self, "next")

    def __len__(self):
        return _ask(self, "len")

    def __str__(self):
        return _ask(self, "str")

    def __repr__(self):
        return _ask(self, "repr")

    def __bool__(self):
        return _ask(self, "bool")

    def __int__(self):
        return _ask(self, "int")

    def __float__(self):
        return _ask(self, "float")

    def __eq__(self, other):
        if self is other:
            return True
        if isinstance(other, (Remote, Stub)):
            link = object.__getattribute__(self, "_link")
            link.fail(Untrusted("two objects of the program's own class are compared, which only the program can do"))
        return False

    __hash__ = None


class Stub:
    """A function, class or module of the program by its name."""

    def __init__(self, link, name):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_name", name)

    def __call__(self, *arguments, **keywords):
        link, name = object.__getattribute__(self, "_link"), object.__getattribute__(self, "_name")
        return link.ask("function", name, arguments, keywords)

    def __getattribute__(self, attribute):
        if attribute == "__class__":
            return Stub
        name = object.__getattribute__(self, "_name")
        if attribute == "__name__":
            return name
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return object.__getattribute__(self, "_link").ask("get", name, (attribute,))

    def __eq__(self, other):
        if isinstance(other, type):
            link = object.__getattribute__(self, "_link")
            link.fail(Untrusted("the test compares a class with one of the program's own"))
        return self is other

    __hash__ = object.__hash__

    def __instancecheck__(self, instance):
        link = object.__getattribute__(self, "_link")
        link.fail(Untrusted("the test asks whether an object is of a class of the program's own"))


def _ask(remote, kind, *arguments):
    return object.__getattribute__(remote, "_link").ask(kind, object.__getattribute__(remote, "_number"), arguments)


def _replace(target, value):
    """Let a list, dict, set or bytearray of the test become what the program has made of it."""
    if type(target) is not type(value):
        raise TypeError("another type")
    if isinstance(target, (list, bytearray)):
        target[:] = value
    else:
        target.clear()
        target.update(value)


def _holds(value, is_bad):
    if isinstance(value, dict):
        return any(_holds(item, is_bad) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return any(_holds(item, is_bad) for item in value)
    return isinstance(value, (float, complex, decimal.Decimal)) and is_bad(value)


def _is_nan(number):
    return number.is_nan() if isinstance(number, decimal.Decimal) else number != number


def _is_inf(number):
    if isinstance(number, decimal.Decimal):
        return number.is_infinite()
    return any(map(math.isinf, (number.real, number.imag)))
