"""Unit tests of a program, in the forms that data sets give them, and running them in the sandbox."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindrlhf.sandbox.code_tests.judging import run_calls, run_statements
from mindrlhf.sandbox.run import SandboxLimits, run_files

# Below it no interpreter starts; a test that has less time left counts as failed.
MIN_TIME_S = 0.05


@dataclass(frozen=True)
class UnitTests:
    """Tests of one of three kinds: statements, calls of a function, or programs' inputs and outputs."""

    statements: tuple[str, ...] = ()
    function: str = ""
    calls: tuple[tuple[list, Any], ...] = ()  # arguments, expected value
    streams: tuple[tuple[str, str], ...] = ()  # standard input, expected standard output

    @classmethod
    def parse(cls, answer: str) -> "UnitTests":
        """Read the tests from the ``answer`` of a record.

        Text that is not JSON is one test of Python statements (HumanEval); a JSON list of texts is one test each
        (MBPP). A JSON object with ``inputs`` and ``outputs`` tests the whole program by its standard input and
        output, or with ``fn_name`` a function by its arguments and value (APPS, TACO).

        Raises:
            ValueError: there is no test, or the JSON is none of these.
        """
        try:
            tests = json.loads(answer)
        except ValueError:
            tests = answer
        if isinstance(tests, str):
            tests = [tests]
        if isinstance(tests, list) and tests and all(isinstance(test, str) and test.strip() for test in tests):
            return cls(statements=tuple(tests))
        if not isinstance(tests, dict) or not {"inputs", "outputs"} <= tests.keys():
            raise ValueError(
                "the answer holds no unit tests: give statements, or a list of them, or inputs and outputs"
            )
        inputs, outputs = tests["inputs"], tests["outputs"]
        if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
            raise ValueError("inputs and outputs of the unit tests must be two lists of the same length, not empty")
        if tests.get("fn_name"):
            if not all(isinstance(arguments, list) for arguments in inputs):
                raise ValueError("with fn_name, each of the inputs must be the list of the function's arguments")
            return cls(function=tests["fn_name"], calls=tuple(zip(inputs, outputs)))
        return cls(streams=tuple(zip(map(_as_text, inputs), map(_as_text, outputs))))

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
            return run_statements(source, self.statements, limits, stop_at_failure, allow_own_helpers)
        return run_calls(source, self.function, self.calls, limits, stop_at_failure)

    def _run_streams(self, source: str, limits: SandboxLimits, stop_at_failure: bool) -> list[bool]:
        deadline_s = time.monotonic() + limits.time_s
        passed: list[bool] = []
        for stdin, expected in self.streams:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s < MIN_TIME_S or (stop_at_failure and not all(passed)):
                break
            run = run_files({"solution.py": source}, "solution.py", stdin, replace(limits, time_s=remaining_s))
            passed.append(run.succeeded and _same_output(run.stdout, expected))
        return passed + [False] * (len(self.streams) - len(passed))


def _as_text(value: str | Sequence) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _same_output(written: str, expected: str) -> bool:
    """Whether two outputs agree but for white space at the ends of lines and of the whole."""
    return [line.rstrip() for line in written.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]
