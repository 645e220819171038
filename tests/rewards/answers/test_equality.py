import subprocess
import sys
import threading

import pytest

from mindrlhf.rewards.answers.equality import MAX_EXPRESSION_CHARS, answers_equal


def test_nothing_is_equal_to_nothing():
    assert not answers_equal("", "") and not answers_equal("", "42")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("opening", ["{", "(", "[", "\\sqrt{"])
def test_deep_nesting_is_not_parsed(opening):
    closing = {"{": "}", "(": ")", "[": "]"}[opening[-1]]
    assert not answers_equal(opening * 60 + "5" + closing * 60, "5")
    assert not answers_equal("5", opening * 200)


@pytest.mark.timeout(60)
def test_long_expressions_are_equal_only_as_texts():
    long = "1+" * MAX_EXPRESSION_CHARS + "1"
    assert answers_equal(long, long)
    assert not answers_equal(long, str(MAX_EXPRESSION_CHARS + 1))
    assert not answers_equal("x" * 10_000_000, "5")


def test_answers_are_not_evaluated_as_python(tmp_path):
    target = tmp_path / "made"
    attack = f"__import__('pathlib').Path('{target}').touch()"
    assert len(attack) < MAX_EXPRESSION_CHARS
    assert not answers_equal(attack, "5")
    assert not target.exists()


def test_latex_is_compared_in_threads_too():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(answers_equal("\\frac{6}{8}", "\\frac{9}{12}+0")))
    thread.start()
    thread.join()
    assert verdicts == [True]


def test_plain_numbers_do_not_load_math_verify():
    script = (
        "import sys; from mindrlhf.rewards.registry import resolve; f = resolve('accuracy_reward').function\n"
        "assert f('#### 1,042', '1042.0') == 1.0 and f('#### 7', '42') == 0.0\n"
        "print([m for m in ('sympy', 'math_verify', 'numpy', 'mindspore') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
