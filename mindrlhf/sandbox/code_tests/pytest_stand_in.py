"""Stand-in for the part of pytest that tests use: the sandbox has the standard library only.

``raises``, ``approx``, ``fixture``, ``param`` and ``mark.parametrize`` do what those of pytest do, as far as unit tests
of programs go (https://docs.pytest.org/en/stable/reference/reference.html); other marks do nothing.
"""

import inspect
import itertools
import math
import re
import sys
import types


class Raises:
    """``pytest.raises``, to be used with ``with``; then it holds the exception as ``value``."""

    def __init__(self, expected, match=None):
        self._expected, self._match = expected, match
        self.type = self.value = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            raise AssertionError("nothing was raised")
        self.type, self.value = kind, error
        if not issubclass(kind, self._expected):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError("another message")
        return True


class Approx:
    """``pytest.approx``: a number, or a list, tuple or dict of numbers, equal within a tolerance."""

    __hash__ = None

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self._expected, self._rel, self._abs, self._nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, actual):
        return self._is_near(actual, self._expected)

    def __ne__(self, actual):
        return not self == actual

    def _is_near(self, actual, expected):
        if isinstance(expected, dict):
            is_dict = isinstance(actual, dict) and actual.keys() == expected.keys()
            return is_dict and all(self._is_near(actual[key], expected[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            is_same = isinstance(actual, (list, tuple)) and len(actual) == len(expected)
            return is_same and all(map(self._is_near, actual, expected))
        if not isinstance(expected, (int, float, complex)) or not isinstance(actual, (int, float, complex)):
            return actual == expected
        if actual == expected:
            return True
        if actual != actual or expected != expected:
            return self._nan_ok and actual != actual and expected != expected
        if math.isinf(abs(actual)) or math.isinf(abs(expected)):
            return False
        relative = 1e-6 if self._rel is None and self._abs is None else self._rel or 0.0
        absolute = 1e-12 if self._abs is None else self._abs
        return abs(actual - expected) <= max(relative * abs(expected), absolute)


class Parameters:
    """``pytest.param``: one row of values of ``parametrize``."""

    def __init__(self, *values, id=None, marks=()):
        self.values = values


class Marks:
    def parametrize(self, names, rows, **_):
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def keep(function):
            cases = []
            for row in rows:
                row = row.values if isinstance(row, Parameters) else (row,) if len(names) == 1 else tuple(row)
                cases.append(dict(zip(names, row, strict=True)))
            function.parametrized = [*getattr(function, "parametrized", []), cases]
            return function

        return keep

    def __getattr__(self, name):
        def mark(*arguments, **_):
            if len(arguments) == 1 and inspect.isroutine(arguments[0]) or inspect.isclass(*arguments[:1] or [None]):
                return arguments[0]
            return lambda function: function

        return mark


def raises(expected, *call, match=None, **keywords):
    context = Raises(expected, match)
    if not call:
        return context
    with context:
        call[0](*call[1:], **keywords)
    return context


def fixture(function=None, **_):
    return function if function is not None else lambda decorated: decorated


def fail(reason="", **_):
    raise AssertionError(reason)


def make_pytest():
    """Return the module that tests import."""
    module = types.ModuleType("pytest")
    module.raises, module.approx, module.param, module.mark = raises, Approx, Parameters, Marks()
    module.fixture, module.fail, module.skip = fixture, fail, fail
    module.main = lambda *_, **__: 0  # all that it would collect is run anyway
    return module


def run_collected(namespace, functions, classes, cases, fixtures):
    """Run what pytest and unittest would; raises what the tests raise, or an AssertionError.

    Args:
        namespace: of the text, after it has run; the others are names in it.
        functions, classes: of tests for pytest.
        cases: classes of unittest.
        fixtures: functions whose values parameters of that name get.
    """
    if "setup_module" in namespace and (functions or classes):
        _call(namespace["setup_module"])
    for name in functions:
        _run_function(namespace[name], namespace, fixtures, ())
    for name in classes:
        kind = namespace[name]
        outer = getattr(kind, "parametrized", [])
        for method in [name for name in dir(kind) if name.startswith("test")]:
            instance = kind()
            for setup in ("setup_class", "setup_method", "setUp", "setup"):
                if hasattr(instance, setup):
                    _call(getattr(instance, setup))
            _run_function(getattr(instance, method), namespace, fixtures, outer)
    if cases:
        _run_cases([namespace[name] for name in cases])


def _run_function(function, namespace, fixtures, outer):
    for rows in itertools.product(*outer, *getattr(function, "parametrized", [])):
        given = {name: value for row in rows for name, value in row.items()}
        made = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in fixtures and parameter.name not in given:
                given[parameter.name] = _make(parameter.name, namespace, fixtures, made)
        function(**given)


def _make(name, namespace, fixtures, made):
    if name not in made:
        function = namespace[name]
        needs = [needed for needed in inspect.signature(function).parameters if needed in fixtures]
        value = function(**{needed: _make(needed, namespace, fixtures, made) for needed in needs})
        made[name] = next(value) if inspect.isgenerator(value) else value
    return made[name]


def _call(setup):
    """Call a function that pytest may give what it is called for, which is not given here."""
    setup(*[None for _ in inspect.signature(setup).parameters])


def _run_cases(kinds):
    unittest = sys.modules["unittest"]
    result = unittest.TestResult()
    unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, kinds)).run(result)
    if not result.wasSuccessful() or not result.testsRun:
        raise AssertionError("a test case failed")
