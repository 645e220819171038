"""Rewards of programs under test."""

import json

from mindrlhf.rewards.registry import resolve
from mindrlhf.sandbox.code_tests.unit_tests import UnitTests
from mindrlhf.sandbox.run import SandboxLimits


def fenced(source: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{source}\n```\nDone."


def reward(completion: str, answer, **options) -> float:
    texts = {"time_limit_s": "30", **{name: str(value) for name, value in options.items()}}
    answer = answer if isinstance(answer, str) else json.dumps(answer)
    return resolve("code_execution", texts)(completion, answer, {})


def passed(source: str, tests: list[str], passes: str = "") -> list[bool]:
    """Return which tests a program passes, all of them in one sandbox.

    With a further one, which it ``passes``: where that fails, one of the others has ended the judge, and so all.
    """
    limits = SandboxLimits(time_s=60.0, memory_bytes=512 << 20)
    found = UnitTests.parse(json.dumps([*tests, *[passes] * bool(passes)])).run(source, limits, stop_at_failure=False)
    assert not passes or found.pop(), "a test has ended the judge"
    return found
