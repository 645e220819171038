# ruff: noqa: F821 -- values.py and distrust.py stand before this text when it runs
"""The side of the tests: runs a data set's statements, in a sandbox and an interpreter that the program is not in.

A name of the program is a stand-in here. To call it sends the arguments to the program's own sandbox, and brings back
the value as data. So what the statements compare are plain values. Standard library only, after ``values.py`` and
``distrust.py``.

Descriptor 3 is a socket to the program. Standard input is JSON with ``tests``, ``allow_own_helpers`` and
``stop_at_failure``. Out goes one line of JSON per test on standard output: true, false, or a text, why the test cannot
be trusted.
"""

import ast
import builtins
import importlib
import json
import os
import socket

# Names of the standard library that tests use without importing them: data sets run them beside a solution that does.
MODULES = (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "inspect"),
    *("itertools", "json", "math", "operator", "os", "random", "re", "statistics", "string", "sys", "time", "typing"),
)
FROM_MODULES = {
    name: module
    for module, names in {
        "collections": "Counter OrderedDict defaultdict deque namedtuple",
        "math": "ceil factorial floor gcd inf isclose isnan nan pi sqrt",
        "copy": "deepcopy",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "itertools": "chain permutations product",
        "typing": "Any Callable Dict Iterable List Optional Sequence Set Tuple Union",
    }.items()
    for name in names.split()
}
MAX_LINE_BYTES = 64 << 20


class Untrusted(BaseException):
    """The test cannot tell a right program from one that cheats. Not an ``Exception``: tests catch those."""


class Gone(BaseException):
    """The program has ended, or does not keep to the protocol."""


class Link:
    """Questions to the program."""

    def __init__(self):
        self._socket = socket.socket(fileno=3)
        self._lines, self._writing = self._socket.makefile("rb"), self._socket.makefile("wb")
        self._functions = []
        self.allows_nan = False
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
            self._send(self._call(reply))
        if "raised" in reply:
            raise _exception(reply)
        try:
            value = self._decode(reply["value"])
            for index, data in (reply.get("changed") or {}).items() if self.writes_back else ():
                _replace(arguments[int(index)], self._decode(data))
        except (ValueError, TypeError, LookupError, RecursionError, AttributeError, ArithmeticError):
            self.fail(Gone())
        return value

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
        if not self.allows_nan and _holds_nan(value):
            # Every comparison with it is false, so that `not abs(f(x) - y) > eps` would hold.
            raise ValueError("not a number")
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

    def __instancecheck__(self, instance):
        link = object.__getattribute__(self, "_link")
        link.fail(Untrusted("the test asks whether an object is of a class of the program's own"))


def _ask(remote, kind, *arguments):
    return object.__getattribute__(remote, "_link").ask(kind, object.__getattribute__(remote, "_number"), arguments)


def _exception(reply):
    names = reply["raised"] if isinstance(reply["raised"], list) else []
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(str(reply.get("text", "")))
            except TypeError:
                break
    return RuntimeError("the program ended its call")


def _replace(target, value):
    """Let a list, dict, set or bytearray of the test become what the program has made of it."""
    if type(target) is not type(value):
        raise TypeError("another type")
    if isinstance(target, (list, bytearray)):
        target[:] = value
    else:
        target.clear()
        target.update(value)


def _holds_nan(value):
    if isinstance(value, float):
        return value != value
    if isinstance(value, complex):
        return value != value
    if isinstance(value, dict):
        return any(map(_holds_nan, value)) or any(map(_holds_nan, value.values()))
    return isinstance(value, (list, tuple, set, frozenset)) and any(map(_holds_nan, value))


def _own_names(tree):
    """Return the names that a test takes from elsewhere: from the program, the standard library or Python."""
    stored = set()
    loaded = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            stored.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return loaded - stored


def _namespace(tree, link):
    """Return the names a test runs with, and those of them that are the program's."""
    own = _own_names(tree)
    found = link.names(sorted(own))
    namespace, programs = {"__name__": "test"}, set()
    others = {name for name in own if not hasattr(builtins, name) and name not in MODULES and name not in FROM_MODULES}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if not others:
        # A task may ask for a function by the name of Python's own, such as sum: only if nothing else can be meant.
        taken = {name for name in called & own if found.get(name) == "callable"}
        if len(taken) > 1:
            raise Untrusted(f"the test calls {', '.join(sorted(taken))}, of which only one can be the program's")
        others = taken
    for name in own - others:
        if name in MODULES:
            namespace[name] = importlib.import_module(name)
        elif name in FROM_MODULES:
            namespace[name] = getattr(importlib.import_module(FROM_MODULES[name]), name)
    for name in others & found.keys():
        programs.add(name)
        namespace[name] = link.ask("name", name) if found[name] == "value" else Stub(link, name)
    return namespace, programs


def _verdict(test, link, allows_own_helpers):
    """Return whether a test passes, why it cannot be trusted, or None once the program has ended."""
    link.allows_nan, link.writes_back, link.trouble = "nan" in test, False, None
    try:
        tree = ast.parse(test)
        namespace, programs = _namespace(tree, link)
        reason, keeps_arguments = distrust(tree, programs)
        if reason and not allows_own_helpers:
            return reason

        def let_write(does):
            link.writes_back = does

        namespace["__let_write__"] = let_write
        tree = ast.fix_missing_locations(WriteBack(keeps_arguments).visit(tree))
        exec(compile(tree, "test.py", "exec"), namespace)
        passes = True
    except Untrusted as error:
        link.trouble, passes = error, False
    except BaseException:  # SystemExit too
        passes = False
    if isinstance(link.trouble, Untrusted):
        return str(link.trouble)
    return None if link.trouble else passes


class WriteBack(ast.NodeTransformer):
    """Lets what the program does to a list or dict it was given show in the test, for calls that stand alone.

    Not in what is asserted: a program could empty the list from which the expected value is still to be computed.
    """

    def __init__(self, keeps_arguments):
        self._kinds = (ast.Expr,) if keeps_arguments else (ast.Expr, ast.Assign, ast.AnnAssign)

    def visit(self, node):
        node = self.generic_visit(node)
        if not isinstance(node, self._kinds) or isinstance(node.value, (ast.Constant, ast.Yield, type(None))):
            return node
        return [_let_write(True), node, _let_write(False)]


def _let_write(does):
    function = ast.Name("__let_write__", ast.Load())
    return ast.Expr(ast.Call(function, [ast.Constant(does)], []))


def main():
    with open(0, "rb", closefd=False) as file:
        request = json.load(file)
    verdicts = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    link = Link()
    for test in request["tests"] if link.is_loaded() else ():
        verdict = _verdict(test, link, request["allow_own_helpers"])
        print(json.dumps(verdict), file=verdicts, flush=True)
        if verdict is None or (verdict is not True and request["stop_at_failure"]):
            break
    os._exit(0)


main()
