"""Runs unit tests on a solution, inside the sandbox: standard library only, nothing of ours is there.

Standard input holds JSON: ``token``, and either ``tests`` (statements, each a test of its own) or ``function`` with
``calls`` (pairs of arguments and the value expected). The last line of the output is the token and one letter per
test, ``p`` or ``f``.

``exec`` is what this file is for: it runs untrusted code in a process that the sandbox holds.
"""

import contextlib
import io
import json
import sys


def main() -> None:
    # All of it is read before the solution runs, which then finds nothing there to learn the token from.
    request = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(io.StringIO()):
        verdicts = "".join("p" if verdict else "f" for verdict in _verdicts(request))
    print(f"\n{request['token']} {verdicts}")


def _verdicts(request: dict) -> list:
    with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    # Not "__main__": what a script does when it is run is not under test.
    namespace = {"__name__": "solution"}
    tests = request["tests"] if "tests" in request else request["calls"]
    try:
        exec(compile(source, "solution.py", "exec"), namespace)
    except BaseException:
        return [False] * len(tests)
    if "tests" in request:
        return [_passes_test(test, dict(namespace)) for test in tests]
    return [_passes_call(request["function"], *call, namespace) for call in tests]


def _passes_test(test: str, namespace: dict) -> bool:
    try:
        exec(compile(test, "test.py", "exec"), namespace)
    except BaseException:  # SystemExit too
        return False
    return True


def _passes_call(name: str, arguments: list, expected: object, namespace: dict) -> bool:
    try:
        # Problems of the kind "LeetCode" put the function into a class.
        function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
        value = function(*arguments)
        # Through JSON, so that a tuple equals the list that the data holds in its place.
        return json.loads(json.dumps(value)) == expected
    except BaseException:
        return False


if __name__ == "__main__":
    main()
