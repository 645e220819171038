# ruff: noqa: F821 -- values, statements, distrust, pytest_stand_in and judge_link stand before this text when it runs
"""The side of the tests: runs a data set's tests, in a sandbox and an interpreter that the program is not in.

A name of the program is a stand-in here. To call it sends the arguments to the program's own sandbox, and brings back
the value as data. So what the statements compare are plain values. Standard library only, after the modules above.

Standard input is JSON with ``tests``, ``setup``, ``entry_point``, ``allow_own_helpers``, ``stop_at_failure`` and
``looks_for_weak``. Out goes one line of JSON per test on standard output: true, false, or a text, why the test cannot
be trusted. Then, if that is asked for and there may be a reward, a line with ``weak``, the numbers of tests that a
constant passes, ``constant``, one that passes all, and ``is_of_tests_alone``, whether that is so for any program.
"""

import ast
import gc
import importlib
import json
import os
import signal
import sys

# Answers that no test should take for right, by kind: a test that passes with all of a kind does not look at the value.
CONSTANTS = ((0, 7919, -7919.5), (True, False), ("", "qz7"), ([], [7919, 2]), ({}, {"qz7": 7919}))
# All pass where a test looks at each item of a value, whatever that is; None passes too where it asks for no truth.
EMPTY = ([], "", {}, ())
# Answers that no data set expects; True is what a test of truth expects.
UNLIKELY = (7919, -7919.5, 1e308, "qz7")
CONSTANTS_TIME_S = 0.5


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
        reason, keeps_arguments = distrust(tree, self._programs)
        if reason and not request["allow_own_helpers"]:
            raise Untrusted(reason)
        tree = ast.fix_missing_locations(WriteBack(keeps_arguments).visit(tree))
        self._code = compile(tree, "test.py", "exec")

    def run(self, link):
        """Run the test; raises what it raises."""
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

        namespace["__let_write__"] = let_write
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


def find_weak(tests):
    """Return the numbers of the tests that any value of a kind passes, and a value, if any, that passes all tests."""

    def stop(*_):
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, CONSTANTS_TIME_S, CONSTANTS_TIME_S / 10)
    weak, constant, is_whole = [], None, False
    try:
        for number, test in enumerate(tests, start=1):
            is_weak = any(all(_passes(test, value) for value in values) for values in CONSTANTS)
            if is_weak or all(_passes(test, value) for value in EMPTY) and not _passes(test, None):
                weak.append(number)
        if not all(_passes(test, True) for test in tests):
            unlikely = UNLIKELY if any("" in test.mentions for test in tests) else (*UNLIKELY, "")
            constant = next((value for value in unlikely if all(_passes(test, value) for test in tests)), None)
        is_whole = True
    except OutOfTime:
        pass
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    is_same_for_all = all(set(test.kinds.values()) == {"callable"} for test in tests)
    return {"weak": weak, "constant": constant, "is_of_tests_alone": is_whole and is_same_for_all}


def _passes(test, value):
    link = ConstantLink(value, test.kinds)
    return _ends_well(test, link) and link.trouble is None


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
        if any(map(is_check, ast.walk(node))):
            return node
        return [_let_write(True), node, _let_write(False)]


def _let_write(does):
    function = ast.Name("__let_write__", ast.Load())
    return ast.Expr(ast.Call(function, [ast.Constant(does)], []))


def main():
    gc.set_threshold(100_000)  # this process is over before there is much to collect
    with open(0, "rb", closefd=False) as file:
        request = json.load(file)
    verdicts = os.fdopen(os.dup(1), "w")
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
    if all_run and request["looks_for_weak"] and (verdict or not request["stop_at_failure"]):
        print(json.dumps(find_weak(tests)), file=verdicts, flush=True)
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
