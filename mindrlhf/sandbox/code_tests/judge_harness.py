# ruff: noqa: F821 -- values, statements, distrust, pytest_stand_in and judge_link stand before this text when it runs
"""The side of the tests: runs a data set's tests, in a sandbox and an interpreter that the program is not in.

A name of the program is a stand-in here. To call it sends the arguments to the program's own sandbox, and brings back
the value as data. So what the statements compare are plain values. Standard library only, after the modules above.

Standard input is JSON with ``tests``, ``setup``, ``entry_point``, ``allow_own_helpers``, ``stop_at_failure``,
``deadline_s`` and ``tried``. Out goes one line of JSON per test on standard output: true, false, or a text, why the
test cannot be trusted. Then, if ``tried`` is no null and there may be a reward, a line with ``weak``, the numbers of
tests that a constant passes, ``constant``, one that passes all, ``tried``, which constants were tried on which tests,
``is_whole``, whether that is all, and ``is_of_tests_alone``, whether it is so for any program.
"""

import ast
import gc
import importlib
import json
import os
import signal
import sys
import time

# Answers that no test should take for right, by kind: a test that passes with all of a kind does not look at the value.
CONSTANTS = ((0, 7919, -7919.5), (True, False), ("", "qz7"), ([], [7919, 2]), ({}, {"qz7": 7919}))
# All pass where a test looks at each item of a value, whatever that is; None passes too where it asks for no truth.
EMPTY = ([], "", {}, ())
# Answers that no data set expects; True is what a test of truth expects.
UNLIKELY = (7919, -7919.5, 1e308, "qz7")
MARGIN_S = 0.4  # from the last constant to the deadline
# Functions that make a number of a text, which may be no number.
CONVERTING = ("float", "complex", "Decimal", "fromhex", "loads", "load", "literal_eval")


class OutOfTime(BaseException):
    """The tests are not looked at any longer."""


class Prepared:
    """A test with the names that it is run with."""

    def __init__(self, text, request, link):
        """Read it.

        Raises:
            NothingTested, Untrusted.
        """
        self._test = read_test(text, request["entry_point"], request["setup"])
        self.mentions = self._test.mentions
        self._programs = dict(self._test.imported)  # names of the test by those of the program
        self._programs.update({name: name for name in self._test.program_names() - self._programs.keys()})
        pythons = {name for name in self._test.taken if is_pythons(name)}
        self.kinds = link.names(sorted({*self._programs.values(), *pythons}))
        self.is_answerable = self._find_programs_names()
        if not self.is_answerable:
            return
        tree = self._test.tree
        reason, keeps_arguments = distrust(tree, self._programs, request["allow_own_helpers"])
        if reason:
            raise Untrusted(reason)
        tree = ast.fix_missing_locations(Watched(keeps_arguments).visit(tree))
        self._code = compile(tree, "test.py", "exec")

    def run(self, link):
        namespace = {"__name__": "__main__" if self._test.is_script else "test"}
        for name in self._test.taken - self._programs.keys():
            if name in MODULES:
                namespace[name] = importlib.import_module(name)
            elif name in FROM_MODULES:
                namespace[name] = getattr(importlib.import_module(FROM_MODULES[name]), name)
        for name, theirs in self._programs.items():
            is_value = self.kinds[theirs] == "value"
            namespace[name] = link.ask("name", theirs) if is_value else Stub(link, theirs)

        def let_write(does):
            link.writes_back = does

        namespace |= {"__let_write__": let_write, "__number__": link.check_number}
        if "unittest" in self._test.mentions:
            import unittest

            unittest.main = lambda *_, **__: None  # all that it would collect is run anyway
        exec(self._code, namespace)
        test = self._test
        run_collected(namespace, test.functions, test.classes, test.cases, test.fixtures)

    def _find_programs_names(self):
        """Add names of Python that the program is asked for; return whether it defines all that the test asks for."""
        if not set(self._programs.values()) <= self.kinds.keys():
            return False
        asked = self._test.candidates()
        if asked:
            found = {name for name in asked if self.kinds.get(name) == "callable"}
            if len(found) > 1:
                raise Untrusted(f"the test calls {', '.join(sorted(found))}, of which only one can be the program's")
            self._programs.update({name: name for name in found})
            return bool(found) and not wraps_others(self._test.tree, *found)
        # An assertion that no function of the program has to do with asks for one of the library's name.
        functions = {
            name: theirs
            for name, theirs in self._programs.items()
            if self.kinds[theirs] != "value" and theirs not in self._test.given
        }
        untouched = asked_apart(self._test.tree, functions) & self._test.taken
        asked = {name for name in untouched if name in FROM_MODULES and name not in TYPES}
        found = {name for name in asked if self.kinds.get(name) == "callable"}
        self._programs.update({name: name for name in found})
        return asked == found


def judge(test, link):
    """Return whether a test passes, why it cannot be trusted, or None once the program has ended."""
    link.begin(test.mentions)
    passes = _ends_well(test, link)
    if isinstance(link.trouble, Untrusted):
        return str(link.trouble)
    return None if isinstance(link.trouble, Gone) else passes and link.trouble is None


def find_weak(tests, tried, time_s):
    """Return which tests any value of a kind passes, and a value, if any, that passes all tests; see above.

    Args:
        tried: what has been tried already: by number and value whether the test passes.
    """

    def stop(*_):
        raise OutOfTime

    def passes(number, value):
        key = f"{number} {value!r}"
        if key not in tried:
            link = ConstantLink(value, tests[number].kinds)
            tried[key] = _ends_well(tests[number], link) and link.trouble is None
        return tried[key]

    numbers, weak, constant, is_whole = range(len(tests)), [], None, False
    sleep, time.sleep = time.sleep, lambda *_: None
    signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(time_s, 0.001), 0.05)
        if not all(passes(number, True) for number in numbers):
            unlikely = UNLIKELY if any("" in test.mentions for test in tests) else (*UNLIKELY, "")
            constant = next((value for value in unlikely if all(passes(number, value) for number in numbers)), None)
        for number in numbers:
            is_weak = any(all(passes(number, value) for value in values) for values in CONSTANTS)
            if is_weak or all(passes(number, value) for value in EMPTY) and not passes(number, None):
                weak.append(number + 1)
        is_whole = True
    except OutOfTime:
        pass
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep = sleep
    alone = all(set(test.kinds.values()) == {"callable"} for test in tests)
    return {"weak": weak, "constant": constant, "tried": tried, "is_whole": is_whole, "is_of_tests_alone": alone}


def _ends_well(test, link):
    try:
        test.run(link)
        return True
    except OutOfTime:
        raise
    except SystemExit as error:
        return error.code in (None, 0)
    except BaseException as error:
        link.trouble = link.trouble or (error if isinstance(error, Untrusted) else None)
        return False


class Watched(ast.NodeTransformer):
    """Lets numbers that are none fail a test, where it compares them and where it makes them of texts; and what the
    program does to a list or dict it was given show in it, see ``writes_back``."""

    def __init__(self, keeps_arguments):
        self._keeps_arguments = keeps_arguments

    def visit(self, node):
        node = self.generic_visit(node)
        if isinstance(node, ast.Compare):
            node.left, *node.comparators = map(_called_with, [node.left, *node.comparators])
        if isinstance(node, ast.Call) and _called(node) in CONVERTING:
            return _called_with(node)
        if (
            isinstance(node, ast.Call)
            and _called(node) == "map"
            and node.args
            and _called(ast.Call(node.args[0])) in CONVERTING
        ):
            name = ast.Name("v", ast.Load())
            function = ast.arguments(posonlyargs=[], args=[ast.arg("v")], kwonlyargs=[], kw_defaults=[], defaults=[])
            node.args[0] = ast.Lambda(function, _called_with(ast.Call(node.args[0], [name], [])))
        if not writes_back(node, self._keeps_arguments) or isinstance(
            node.value, (ast.Constant, ast.Yield, type(None))
        ):
            return node
        return [_let_write(True), node, _let_write(False)]


def _called_with(node):
    return ast.Call(ast.Name("__number__", ast.Load()), [node], [])


def _let_write(does):
    function = ast.Name("__let_write__", ast.Load())
    return ast.Expr(ast.Call(function, [ast.Constant(does)], []))


def main():
    gc.set_threshold(100_000)  # this process is over before there is much to collect
    with open(0, "rb", closefd=False) as file:
        request = json.load(file)
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sys.modules["pytest"] = make_pytest()
    link = Link()
    tests, verdict = [], None
    if link.is_loaded():
        for text in request["tests"]:
            verdict = _verdict(text, request, link, tests)
            print(json.dumps(verdict), file=verdicts, flush=True)
            if verdict is None or (verdict is not True and request["stop_at_failure"]):
                break
    all_run = len(tests) == len(request["tests"]) and all(test.is_answerable for test in tests)
    if all_run and request["tried"] is not None and (verdict or not request["stop_at_failure"]):
        time_s = request["deadline_s"] - MARGIN_S - time.monotonic()
        print(json.dumps(find_weak(tests, request["tried"], time_s)), file=verdicts, flush=True)
    os._exit(0)


def _verdict(text, request, link, tests):
    try:
        tests.append(Prepared(text, request, link))
        return tests[-1].is_answerable and judge(tests[-1], link)
    except (Untrusted, NothingTested) as error:
        return str(error)
    except Gone:
        return None


main()
