"""Judges a program by what comes out of its sandbox, without anything of the tests going in but inputs.

Calls of a function: inputs go in one at a time, values come out as data and are compared here. Statements: they run in
a second sandbox, from which they reach the program by questions and answers. In neither case do judge and judged share
an interpreter, a file or a standard stream; between them is a socket that carries lines of JSON.
"""

import functools
import hashlib
import json
import math
import re
import socket
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

from mindrlhf.errors import Unavailable
from mindrlhf.sandbox.run import Program, SandboxLimits

# An answer longer than this many times what is expected, or this many bytes, is not read to its end.
MAX_ANSWER_RATIO, MAX_ANSWER_BYTES = 4, 1 << 20
_READ_SIZE_BYTES = 1 << 16
_weak_tests: dict[bytes, dict] = {}  # what the judge found of requests, by their checksums
_MAX_REMEMBERED = 4096
# What runs in the sandbox of the tests, one after the other.
_JUDGE = ("values", "statements", "distrust", "pytest_stand_in", "judge_link", "judge_harness")


def run_calls(
    source: str,
    function: str,
    calls: Sequence[tuple[list, Any]],
    limits: SandboxLimits,
    stop_at_failure: bool,
    is_wrapped: bool = False,
) -> list[bool]:
    """Return for each call, arguments and expected value, whether the program's function returns that value.

    Args:
        is_wrapped: each expected value is a list of one, and its item is expected as well.

    All are failed when the program ends or the time is up before the last.

    Raises:
        OSError: the sandbox cannot run programs here.
    """
    ours, theirs = socket.socketpair()
    passed: list[bool] = []
    with ours, theirs, _start_program(source, limits, theirs) as program:
        theirs.close()
        try:
            link = _Link(ours, program.deadline_s)
            if link.receive(MAX_ANSWER_BYTES).get("loaded") is not True:
                return [False] * len(calls)
            for arguments, expected in calls:
                link.send({"ask": "function", "of": function, "args": [_as_argument(item) for item in arguments]})
                size = MAX_ANSWER_BYTES + MAX_ANSWER_RATIO * len(json.dumps(expected)) + link.sent_bytes
                reply = link.receive(size)
                accepted = [expected, *expected] if is_wrapped else [expected]
                passed.append("value" in reply and any(_is_expected(reply["value"], value) for value in accepted))
                if stop_at_failure and not passed[-1]:
                    break
        except (ConnectionError, TimeoutError, ValueError, TypeError, RecursionError, OverflowError):
            program.check_started()
            return [False] * len(calls)
    return passed + [False] * (len(calls) - len(passed))


def run_statements(
    source: str,
    statements: Sequence[str],
    limits: SandboxLimits,
    stop_at_failure: bool,
    allow_own_helpers: bool,
    *,
    setup: str = "",
    entry_point: str = "",
) -> list[bool]:
    """Return which statements the program passes; all are failed when it ends or the time is up before the last.

    What passes and would pass whatever the program returned is left out: it earns nothing.

    Args:
        setup: runs in the program's sandbox, after it.
        entry_point: what HumanEval's ``check`` is called with.

    Raises:
        OSError: the sandbox cannot run programs here.
        ValueError: a statement that cannot tell a right program from one that cheats.
        Unavailable: there was no time to tell.
    """
    request = {
        "tests": statements,
        "setup": setup,
        "entry_point": entry_point,
        "allow_own_helpers": allow_own_helpers,
        "stop_at_failure": stop_at_failure,
    }
    key = hashlib.sha256(json.dumps(request).encode()).digest()
    found = _weak_tests.get(key, {"weak": [], "constant": None, "tried": {}, "is_whole": False})
    request["tried"] = None if found["is_whole"] or allow_own_helpers else found["tried"]
    request["deadline_s"] = time.monotonic() + limits.time_s
    files = {"main.py": _text_of(*_JUDGE)}
    ours, theirs = socket.socketpair()
    with ours, theirs, _start_program(source, limits, theirs, setup) as program:
        with Program(files, "main.py", limits, stdin=json.dumps(request), link=ours, is_main_ours=True) as judge:
            ours.close()
            theirs.close()
            run = judge.collect()
        program.check_started()
    verdicts = [json.loads(line) for line in run.stdout.splitlines()] if run.succeeded else []
    is_short = False
    if verdicts and isinstance(verdicts[-1], dict):
        found = verdicts.pop()
        is_short = not found["is_whole"]
        if found["is_of_tests_alone"]:
            _remember(key, found)
    for number, verdict in enumerate(verdicts, start=1):
        if isinstance(verdict, str):
            raise ValueError(f"unit test {number} cannot be trusted: {verdict}")
    was_stopped = stop_at_failure and verdicts and not verdicts[-1]
    if len(verdicts) < len(statements) and not was_stopped or None in verdicts:
        return [False] * len(statements)
    _check_strength(found, len(statements), limits.time_s if is_short and any(verdicts) else None)
    kept = [verdict for number, verdict in enumerate(verdicts, start=1) if not (verdict and number in found["weak"])]
    return kept + [False] * (len(statements) - len(verdicts))


def _check_strength(found: dict, num_tests: int, was_short_s: float | None) -> None:
    if was_short_s is not None:
        raise Unavailable(
            f"within {was_short_s:g} s the unit tests could not be tried on constants, which they might pass: their "
            "own code takes long; raise code_execution.time_limit_s"
        )
    reason = "they pass whatever the program returns" if len(found["weak"]) == num_tests else ""
    if found["constant"] is not None:
        reason = reason or f"always to return {found['constant']!r} passes them all"
    if reason:
        raise ValueError(f"the unit tests cannot be trusted: {reason}")


def _remember(key: bytes, found: dict) -> None:
    if len(_weak_tests) >= _MAX_REMEMBERED:
        _weak_tests.pop(next(iter(_weak_tests)))
    _weak_tests[key] = found


def _start_program(source: str, limits: SandboxLimits, link: socket.socket, setup: str = "") -> Program:
    files = {"main.py": _text_of("values", "harness"), "solution.py": source} | ({"setup.py": setup} if setup else {})
    return Program(files, "main.py", limits, link=link, is_main_ours=True, captures=False)


@functools.cache
def _text_of(*modules: str) -> str:
    """Return the source of modules of this package, one after the other: what runs in a sandbox is one file."""
    package = resources.files("mindrlhf.sandbox.code_tests")
    return "\n".join(package.joinpath(f"{name}.py").read_text(encoding="utf-8") for name in modules)


class _Link:
    """Lines of JSON to and from the program, within its time."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection, self._deadline_s = connection, deadline_s
        self._unread = b""
        self.sent_bytes = 0

    def send(self, message: dict) -> None:
        text = json.dumps(message).encode() + b"\n"
        self.sent_bytes = len(text)
        self._set_timeout()
        self._connection.sendall(text)

    def receive(self, max_bytes: int) -> dict:
        """Return the next message.

        Raises:
            ConnectionError: the program has ended. TimeoutError: its time is up. ValueError: no message, or too long.
        """
        chunks = [self._unread]
        size = len(self._unread)
        while b"\n" not in chunks[-1]:
            self._set_timeout()
            chunk = self._connection.recv(_READ_SIZE_BYTES)
            if not chunk:
                raise ConnectionError("the program has ended")
            chunks.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                raise ValueError("the answer is too long")
        line, _, self._unread = b"".join(chunks).partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("no message")
        return message

    def _set_timeout(self) -> None:
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining_s)


def _as_argument(value: Any) -> Any:
    """Return an argument as data. A dict whose keys are all whole numbers had such keys before it became JSON, as the
    harness of APPS knows."""
    if isinstance(value, dict) and value and all(re.fullmatch(r"-?\d{1,18}", key) for key in value):
        return {"dict": [[int(key), _as_data(item)] for key, item in value.items()]}
    return _as_data(value)


def _as_data(value: Any) -> Any:
    """Return a JSON value in the form of ``values.encode``."""
    if isinstance(value, list):
        return [_as_data(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[key, _as_data(item)] for key, item in value.items()]}
    if isinstance(value, int) and value.bit_length() > 10_000:
        return {"int": hex(value)}
    return value


def _is_expected(data: Any, expected: Any) -> bool:
    """Compare a program's result, as data, with a value of JSON: a tuple counts as a list, True is not 1."""
    if isinstance(data, dict):
        ((kind, content),) = data.items() if len(data) == 1 else (("", None),)
        if kind == "dict":
            return isinstance(expected, dict) and _is_expected_dict(content, expected)
        if kind == "tuple":
            data = content
        elif kind == "int":
            data = int(content, 16)
        elif kind == "float" and content in ("inf", "-inf") or kind == "float" and math.isfinite(float(content)):
            data = float(content)
        else:
            return False
    if isinstance(data, list):
        return (
            isinstance(expected, list)
            and len(data) == len(expected)
            and all(_is_expected(item, other) for item, other in zip(data, expected))
        )
    if isinstance(data, bool) or isinstance(expected, bool) or data is None or isinstance(data, str):
        return type(data) is type(expected) and data == expected
    return isinstance(data, (int, float)) and isinstance(expected, (int, float)) and data == expected


def _is_expected_dict(pairs: Any, expected: dict) -> bool:
    found: dict[str, Any] = {}
    for key, item in pairs:
        # As JSON writes keys that are no text.
        text = key if isinstance(key, str) else json.dumps(key) if not isinstance(key, (list, dict)) else None
        if text is None or text in found:
            return False
        found[text] = item
    return found.keys() == expected.keys() and all(_is_expected(found[key], expected[key]) for key in found)
