
import pytest
from code_rewards import fenced, reward

from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.registry import resolve
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
from mindrlhf.rewards.verifiers.code_execution import _program
from mindrlhf.sandbox.code_tests.unit_tests import UnitTests

pytestmark = pytest.mark.timeout(120)


ADD = fenced("def add(a, b):\n    print('noise')\n    return a + b\n\nif __name__ == '__main__':\n    input()")
WRONG = fenced("def add(a, b):\n    return a + b if a < 5 else 0")
SUM = fenced("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')")


@pytest.mark.parametrize(
    ("completion", "answer", "all_passed", "share"),
    [
        (ADD, "assert add(1, 2) == 3\nassert add(5, 5) == 10", 1.0, 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(5, 5) == 10"], 1.0, 1.0),
        (WRONG, ["assert add(1, 2) == 3", "assert add(5, 5) == 10"], 0.0, 0.5),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}, 1.0, 1.0),
        (WRONG, {"fn_name": "add", "inputs": [[1, 2], [7, 1]], "outputs": [3, 8]}, 0.0, 0.5),
        (
            fenced("class Solution:\n    def pair(self, a):\n        return a, a"),
            {"fn_name": "pair", "inputs": [[1]], "outputs": [[1, 1]]},
            1.0,
            1.0,
        ),
        (SUM, {"inputs": ["1 2", "3\n4\n"], "outputs": ["3", "7\n\n"]}, 1.0, 1.0),
        (SUM, {"inputs": ["1 2", "3 4", "5 5"], "outputs": ["3", "8", "10"]}, 0.0, 2 / 3),
        ("def add(a, b): return a + b", ["assert add(1, 2) == 3"], 0.0, 0.0),
        (fenced("def add(a, b:"), ["assert add(1, 2) == 3"], 0.0, 0.0),
        (fenced("1 / 0"), ["assert f() == 1"], 0.0, 0.0),
        (ADD + "\n" + fenced("x = 1", "text"), ["assert add(1, 2) == 3"], 1.0, 1.0),
        (fenced("def add(a, b): return 0") + "\n" + ADD, ["assert add(1, 2) == 3"], 1.0, 1.0),
    ],
)
def test_rewards(completion, answer, all_passed, share):
    assert reward(completion, answer) == all_passed
    assert reward(completion, answer, partial="true") == pytest.approx(share)


@pytest.mark.parametrize("language", ["python", "Python", "py", "python3", ""])
@pytest.mark.parametrize("fence", ["```", "~~~", "````", "   ```", "\t~~~"])
def test_a_program_is_found_in_any_fence_also_before_an_example_of_its_use(fence, language):
    indent, source = fence.rstrip("`~"), "def add(a, b):\n    return a + b\n"
    lines = [f"{fence}{language}", *(indent + line for line in source.splitlines())]
    example = [fence, "So:", "", f"{fence}{language}", f"{indent}print(add(1, 2))", fence, "prints 3."]
    for behind in ([], [fence], example):
        text = "\n".join(["Here:", *lines, *behind])
        assert _program(text, "assert add(1, 2) == 3").strip() == source.strip(), text
    assert _program("add(1, 2)", "assert add(1, 2) == 3") is None


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "import os\nos.write(1, b' p')\nos._exit(0)",
        "import os\nos.write(1, b'\\n' + b'0' * 32 + b' p\\n')\nos._exit(0)",
        "import sys, os\nos.write(1, sys.stdin.read().encode() + b' p')\nos._exit(0)",
        "while True: pass",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    ],
)
def test_a_program_that_ends_or_stalls_before_its_tests_fails_them(source):
    assert reward(fenced(source), ["assert f() == 1"], time_limit_s=2) == 0.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "holds no unit tests"),
        ("[]", "holds no unit tests"),
        ("42", "holds no unit tests"),
        ('{"inputs": []}', "holds no unit tests"),
        ('{"inputs": [], "outputs": []}', "same length, not empty"),
        ('{"inputs": ["1"], "outputs": []}', "same length, not empty"),
        ('{"fn_name": "f", "inputs": [1], "outputs": [1]}', "list of the function's arguments"),
    ],
)
def test_answers_without_tests_are_errors(answer, message):
    with pytest.raises(ValueError, match=message):
        UnitTests.parse(answer)


def test_what_passes_whatever_is_returned_is_no_share():
    nothing = fenced("def add(a, b): return 0")
    assert reward(nothing, ["assert add(1, 2) != 7", "assert add(1, 2) == 3"], partial="true") == 0.0


def test_a_stalling_program_earns_nothing_and_does_not_fail_the_verifier():
    loop = fenced("while True: pass")
    samples = [RewardInput(i, text, '["assert add(1, 2) == 3"]') for i, text in enumerate((loop, ADD, loop))]
    with RewardPool(Selection(("code_execution",), (1.0,)), timeout_s=20.0) as pool:
        results = pool.score(samples)
    assert [result.total for result in results] == [0.0, 1.0, 0.0]
    assert not any(result.failures for result in results)


DRAFT = fenced("def add(a, b): return a + b")
SUBTRACTING = fenced("def add(a, b): return a - b")


@pytest.mark.parametrize(
    ("completion", "prompt", "passed"),
    [
        (f"<think>{DRAFT}</think>\n{SUBTRACTING}", "", 0.0),
        (f"<think>{DRAFT}</think>\nI do not know.", "", 0.0),
        (f"<think>{DRAFT}", "", 0.0),
        (f"{DRAFT}", "<|im_start|>assistant\n<think>\n", 0.0),
        (f"{DRAFT}</think>\n{SUBTRACTING}", "<|im_start|>assistant\n<think>\n", 0.0),
        (f"<reasoning>{DRAFT}</reasoning>\n{SUBTRACTING}", "", 0.0),
        (f"{DRAFT}\nOr so:\n{SUBTRACTING}", "", 0.0),
        (f"{SUBTRACTING}</think>\n{DRAFT}", "<|im_start|>assistant\n<think>\n", 1.0),
        (f"<think>{SUBTRACTING}</think>\n{DRAFT}", "", 1.0),
        (DRAFT, "<|im_start|>assistant\n<think>\n\n</think>\n\n", 1.0),
    ],
)
def test_a_program_in_the_thoughts_is_a_draft(completion, prompt, passed):
    verifier = resolve("code_execution", {"time_limit_s": "30"})
    assert verifier(completion, "assert add(1, 2) == 3", {"prompt": prompt}) == passed
