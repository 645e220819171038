"""Does the program pass its unit tests?"""

import re
import textwrap

from mindrlhf.errors import Unavailable
from mindrlhf.rewards.answers.extraction import behind_thoughts
from mindrlhf.rewards.registry import register_comparing
from mindrlhf.sandbox import time_limit
from mindrlhf.sandbox.code_tests.unit_tests import UnitTests
from mindrlhf.sandbox.run import SandboxLimits

# What the tests leave of the pool's time limit for ending their processes, so that a slow program earns 0 for its
# tests instead of failing the verifier.
MARGIN_S = 1.0
MAX_PROGRAM_CHARS = 100_000
_BLOCK = re.compile(
    r"^[ \t]*(```|~~~)[`~]*[ \t]*([A-Za-z0-9+]*)[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE
)
_DEFINED = re.compile(r"^(?:async def|def|class)[ \t]+(\w+)", re.MULTILINE)


@register_comparing
def code_execution(
    completion: str,
    answer: str,
    *,
    prompt: str = "",
    time_limit_s: float = 6.0,
    memory_limit_mib: int = 512,
    partial: bool = False,
    allow_own_helpers: bool = False,
) -> float:
    """1 if the program passes all unit tests, else 0; with ``partial``, the share of the tests it passes.

    The program is the last block between fences (``` or ~~~; the last may be open) behind the thoughts, by preference
    one marked as Python, and one that defines a name which the tests use. ``answer`` holds the tests: Python
    statements, a JSON list of them, or JSON with ``inputs`` and ``outputs``
    (``mindrlhf.sandbox.code_tests.unit_tests``).
    All tests together have ``time_limit_s``, and no more than ``reward.timeout_s`` less a second; each process has
    ``memory_limit_mib``. See ``mindrlhf.sandbox.run`` for what the program cannot do.

    Expected values never come near the program: what it returns leaves its sandbox as data and is compared elsewhere
    (``mindrlhf.sandbox.code_tests.judging``). A statement that the program could pass by its own definitions is an
    error that says why, unless ``allow_own_helpers``.

    Raises:
        ValueError: the answer holds no unit tests, or one that cannot tell a right program from one that cheats.
        Unavailable: the sandbox cannot run programs here.
    """
    tests = UnitTests.parse(answer)
    program = _program(behind_thoughts(completion, prompt), answer)
    if program is None or len(program) > MAX_PROGRAM_CHARS:
        return 0.0
    limits = SandboxLimits(
        time_s=max(0.0, min(time_limit_s, time_limit.remaining_s() - MARGIN_S)), memory_bytes=memory_limit_mib << 20
    )
    try:
        passed = tests.run(program, limits, not partial, allow_own_helpers)
    except OSError as error:
        raise Unavailable(f"the sandbox ran no program: {error}") from error
    return sum(passed) / len(passed) if partial else float(all(passed))


def _program(completion: str, tests: str) -> str | None:
    # The program comes last: this bounds the search in hostile completions.
    blocks = _BLOCK.findall(completion[-4 * MAX_PROGRAM_CHARS :])
    marked = [source for _, language, source in blocks if language.lower() in ("python", "python3", "py")]
    sources = list(map(textwrap.dedent, marked or [source for *_, source in blocks]))
    used = {*re.findall(r"\w+", tests)}
    defining = [source for source in sources if not used.isdisjoint(_DEFINED.findall(source))]
    return (defining or sources or [None])[-1]
