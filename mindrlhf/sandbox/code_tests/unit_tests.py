"""Unit tests of a program, in the forms that data sets give them, and running them in the sandbox."""

import ast
import functools
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindrlhf.sandbox.code_tests.distrust import distrust
from mindrlhf.sandbox.code_tests.judging import run_calls, run_statements
from mindrlhf.sandbox.code_tests.statements import NothingTested, read_test
from mindrlhf.sandbox.run import SandboxLimits, run_files

# Below it no interpreter starts; a test that has less time left counts as failed.
MIN_TIME_S = 0.05
RELATIVE = 1e-6  # between floats on standard output
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])", re.ASCII)
# What HumanEval's and LeetCode's harnesses hand to `check`: a name, or a method of an object made without arguments.
_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\(\))?(\.[A-Za-z_]\w*)*")
# What tests look like, in Python and in JSON.
_SIGNS = re.compile(
    r"""(^|\["|\\n)\s*assert\b|(^|\\n)def (test|check)\w*\(|\bTestCase\b"""
    r"""|"(outputs|test_list|entry_point|test_cases)"\s*:""",
    re.MULTILINE,
)
_KEYS = frozenset({"test_list", "entry_point", "test_cases"})
_EXPECTED_FORMS = (
    "give Python tests, a list of them, {inputs, outputs}, a list of {input, output}, or {test, entry_point}"
)


@dataclass(frozen=True)
class UnitTests:
    """Tests of one of three kinds: statements, calls of a function, or programs' inputs and outputs."""

    statements: tuple[str, ...] = ()
    setup: str = ""  # of statements: runs in the program's sandbox, after it
    entry_point: str = ""  # of statements: what HumanEval's `check` is called with
    function: str = ""
    calls: tuple[tuple[list, Any], ...] = ()  # arguments, expected value
    is_wrapped: bool = False  # each expected value stands in a list of its own (TACO)
    streams: tuple[tuple[str, str], ...] = ()  # standard input, expected standard output

    @classmethod
    def parse(cls, answer: str) -> "UnitTests":
        """Read the tests from the ``answer`` of a record, in one of the forms of ``docs/verifiers.md``.

        Raises:
            ValueError: there is no test, one that tests nothing, or the JSON is of no known form.
        """
        return _parse(answer)

    @classmethod
    def check_record(cls, answer: str, verifier: str, allow_own_helpers: bool = False) -> None:
        """Parse the answer of a record that chooses ``verifier`` (names with commas between), if it holds unit tests:
        if it chooses ``code_execution``, or nothing and looks like them.

        Raises:
            ValueError: as ``parse``, or a test will be refused whatever the program is.
        """
        if "code_execution" not in verifier.split(",") and (verifier or not looks_like_tests(answer)):
            return
        tests = cls.parse(answer)
        for number, text in enumerate(tests.statements, start=1):
            test = read_test(text, tests.entry_point, tests.setup)
            programs = {name: name for name in test.program_names()} | test.imported
            if reason := distrust(test.tree, programs, allow_own_helpers)[0]:
                raise ValueError(f"unit test {number} cannot be trusted: {reason}")

    def run(
        self, source: str, limits: SandboxLimits, stop_at_failure: bool, allow_own_helpers: bool = False
    ) -> list[bool]:
        """Return which tests ``source`` passes; all of them together have ``limits.time_s``.

        Args:
            source: the program.
            limits: of one process of the sandbox, time aside.
            stop_at_failure: the tests after the first failed one need not be run; they count as failed.
            allow_own_helpers: run statements, too, that the program can pass by what it defines itself.

        Raises:
            OSError: the sandbox cannot run programs here.
            ValueError: a statement that cannot tell a right program from one that cheats.
        """
        if self.streams:
            return self._run_streams(source, limits, stop_at_failure)
        if self.statements:
            return run_statements(
                source,
                self.statements,
                limits,
                stop_at_failure,
                allow_own_helpers,
                setup=self.setup,
                entry_point=self.entry_point,
            )
        return run_calls(source, self.function, self.calls, limits, stop_at_failure, self.is_wrapped)

    def _run_streams(self, source: str, limits: SandboxLimits, stop_at_failure: bool) -> list[bool]:
        deadline_s = time.monotonic() + limits.time_s
        passed: list[bool] = []
        for stdin, expected in self.streams:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s < MIN_TIME_S or (stop_at_failure and not all(passed)):
                break
            run = run_files({"solution.py": source}, "solution.py", stdin, replace(limits, time_s=remaining_s))
            passed.append(run.succeeded and _same_output(run.stdout, expected))
        # To print nothing is right where nothing is expected, and earns nothing.
        kept = [
            has_passed for has_passed, (_, expected) in zip(passed, self.streams) if expected.strip() or not has_passed
        ]
        return kept + [False] * (len(self.streams) - len(passed))


@functools.lru_cache(maxsize=16)  # the samples of a prompt have one answer
def _parse(answer: str) -> UnitTests:
    tests = _json_in(answer)
    if isinstance(tests, str):
        return _statements([tests])
    if isinstance(tests, list) and tests:
        if all(isinstance(test, str) and test.strip() for test in tests):
            return _statements(tests)
        if all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
            return _cases(tests)
    if isinstance(tests, dict):
        if {"inputs", "outputs"} <= tests.keys():
            return _pairs(tests["inputs"], tests["outputs"], tests.get("fn_name"))
        for key in ("test", "tests", "test_list", "functional", "assert_case"):
            if tests.get(key) and isinstance(tests[key], (str, list)):
                return _with_setup(tests, tests[key])
        if isinstance(tests.get("test_cases"), list):
            return _cases(tests["test_cases"], tests.get("fn_name"))
        if "public_test_cases" in tests or "private_test_cases" in tests:
            return _live_code_bench(tests)
    raise ValueError(f"the answer holds no unit tests: {_EXPECTED_FORMS}")


def looks_like_tests(answer: str) -> bool:
    """Return True for an answer that is meant as unit tests, good ones or not."""
    if not _SIGNS.search(answer):
        return False
    tests = _json_in(answer)
    if isinstance(tests, str):
        try:
            ast.parse(tests)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True
    if isinstance(tests, dict):
        return not _KEYS.isdisjoint(tests) or {"inputs", "outputs"} <= tests.keys()
    return isinstance(tests, list) and all(isinstance(test, str) for test in tests)


def _json_in(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _statements(tests: Sequence[str], setup: str = "", entry_point: str = "") -> UnitTests:
    for number, test in enumerate(tests, start=1):
        if not test.strip():
            raise ValueError(f"the answer holds no unit tests: {_EXPECTED_FORMS}")
        try:
            read_test(test, entry_point, setup)
        except NothingTested as error:
            raise ValueError(f"unit test {number} tests nothing: {error}") from None
    return UnitTests(statements=tuple(tests), setup=setup, entry_point=entry_point)


def _with_setup(record: Mapping[str, Any], tests: str | list) -> UnitTests:
    """Read {test, entry_point} of HumanEval, {test_list, test_setup_code, test_imports} of MBPP."""
    tests = [tests] if isinstance(tests, str) else tests
    imports = record.get("test_imports") or []
    setup = record.get("test_setup_code") or record.get("setup") or ""
    entry_point = record.get("entry_point") or ""
    if not all(isinstance(text, str) for text in (*tests, *imports, setup, entry_point)):
        raise ValueError("the unit tests, their imports, their setup and their entry_point must be text")
    if entry_point and not _ENTRY_POINT.fullmatch(entry_point):
        raise ValueError(f"the entry_point of the unit tests is {entry_point[:80]!r}: give a name such as 'add'")
    return _statements(["\n".join([*imports, test]) for test in tests], setup, entry_point)


def _cases(cases: Sequence[Any], function: str | None = None) -> UnitTests:
    """Read a list of {input, output}, with the function's name at each that calls one."""
    if not all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases):
        raise ValueError("each of the test cases must hold input and output")
    names = {function} if function else set()
    kinds = set()
    for case in cases:
        metadata = _json_in(case.get("metadata"))
        metadata = metadata if isinstance(metadata, dict) else {}
        names |= {name for name in (case.get("fn_name"), metadata.get("func_name")) if name}
        kinds.add(str(case.get("testtype") or case.get("type") or "stdin"))
    if "functional" in kinds and not names:
        raise ValueError("functional test cases need the function's name: fn_name, or func_name in the metadata")
    if len(names) > 1 or len(kinds) > 1:
        raise ValueError(f"the test cases are of several kinds or functions: {', '.join(sorted(names | kinds))}")
    return _pairs([case["input"] for case in cases], [case["output"] for case in cases], *names)


def _live_code_bench(record: Mapping[str, Any]) -> UnitTests:
    metadata = _json_in(record.get("metadata"))
    cases = []
    for key in ("public_test_cases", "private_test_cases"):
        found = _json_in(record.get(key) or [])
        if not isinstance(found, list):
            raise ValueError(f"the {key} are compressed, by pickle, which is not read: write them as JSON")
        cases += found
    if not cases:
        raise ValueError(f"the answer holds no unit tests: {_EXPECTED_FORMS}")
    return _cases(cases, metadata.get("func_name") if isinstance(metadata, dict) else None)


def _pairs(inputs: Any, outputs: Any, function: Any = None) -> UnitTests:
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
        raise ValueError("inputs and outputs of the unit tests must be two lists of the same length, not empty")
    if not function:
        streams = tuple(zip(map(_as_text, inputs), map(_as_text, outputs)))
        if not any(expected.strip() for _, expected in streams):
            raise ValueError("the unit tests test nothing: every expected output is empty")
        return UnitTests(streams=streams)
    # "Solution().add" is found as "add" in the class.
    name = str(function).rpartition(".")[2]
    if not name.isidentifier():
        raise ValueError(f"fn_name is {str(function)[:80]!r}, which is no name of a function")
    if all(isinstance(text, str) for text in (*inputs, *outputs)):
        inputs, outputs = _lines_of_json(inputs, outputs)
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("with fn_name, each of the inputs must be the list of the function's arguments")
    is_wrapped = all(isinstance(expected, list) and len(expected) == 1 for expected in outputs)
    return UnitTests(function=name, calls=tuple(zip(inputs, outputs)), is_wrapped=is_wrapped)


def _lines_of_json(inputs: Sequence[str], outputs: Sequence[str]) -> tuple[list, list]:
    """Return arguments and values that LiveCodeBench writes as JSON, each argument on a line of its own."""
    try:
        arguments = [[json.loads(line) for line in text.split("\n") if line.strip()] for text in inputs]
        return arguments, [json.loads(text) for text in outputs]
    except ValueError:
        raise ValueError("inputs and outputs of a function that are text must be JSON, an argument a line") from None


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _same_output(written: str, expected: str) -> bool:
    """Compare two outputs but for white space at the ends of lines and of the whole, and where the tests' own numbers
    are floats, for a relative difference of 1e-6."""
    lines = [line.rstrip() for line in written.rstrip().splitlines()]
    wanted = [line.rstrip() for line in expected.rstrip().splitlines()]
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(written: str, expected: str) -> bool:
    if written == expected:
        return True
    numbers, wanted = _NUMBER.findall(written), _NUMBER.findall(expected)
    is_same_text = _NUMBER.sub("0", written) == _NUMBER.sub("0", expected)
    return is_same_text and all(map(_is_near, numbers, wanted))


def _is_near(written: str, expected: str) -> bool:
    if written == expected or not set(".eE") & set(expected):
        return written == expected
    number, wanted = float(written), float(expected)
    return math.isfinite(number) and math.isfinite(wanted) and abs(number - wanted) <= RELATIVE * abs(wanted)
