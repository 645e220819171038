import pytest

from mindrlhf.rewards.lint import example_samples, lint
from mindrlhf.rewards.types import RewardInput

pytestmark = pytest.mark.timeout(120)

FUNCTIONS = """
import os, re, time
def random(completion, answer):
    return float(os.getpid())
def length(completion, answer):
    return len(completion)
def constant(completion, answer):
    return 1.0
def faulty(completion, answer):
    if len(completion) > 10**5:
        time.sleep(1000)
    return 1 / (completion.count("So the") - 1)
def odd(completion, answer):
    return object()
def by_value(completion, answer):
    found = re.findall(r"([0-9]+) \\+ ([0-9]+)", completion)
    return float(answer in completion or any(int(a) + int(b) == int(answer) for a, b in found))
def slow(completion, answer):
    time.sleep(0.02)
    return len(completion) % 2
"""


def check(tmp_path, name, samples=None, timeout_s=20.0) -> dict[str, list[str]]:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    found: dict[str, list[str]] = {"ok": [], "warning": [], "error": []}
    for level, text in lint(f"{path}:{name}", samples or example_samples(), {}, timeout_s=timeout_s):
        found[level].append(text)
    return found


def said(texts, words) -> bool:
    return any(words in text for text in texts)


def test_a_good_verifier_passes(tmp_path):
    findings = lint("accuracy_reward", example_samples(), {}, timeout_s=20.0)
    assert {level for level, text in findings if "scores/s" not in text} == {"ok"}
    # Half of the examples are right.
    assert said([text for _, text in findings], "range 0 to 1, mean 0.5, 2 different values")


def test_randomness_is_found(tmp_path):
    assert said(check(tmp_path, "random")["error"], "not deterministic: 128 of 128")


def test_paying_for_the_prompt_is_found(tmp_path):
    texts = ["21", "It is 20.", "I do not know", "20", "21!"]
    samples = [RewardInput(i, text, "21", "What is 14 + 7?") for i, text in enumerate(texts)]
    assert said(check(tmp_path, "by_value", samples)["warning"], "2 of 2 responses that only repeat the prompt earn")
    findings = lint("accuracy_reward", samples, {}, timeout_s=20.0)
    assert said([text for level, text in findings if level == "ok"], "for 2 responses that only repeat the prompt")


def test_paying_for_length_is_found(tmp_path):
    assert said(check(tmp_path, "length")["warning"], "length +1.00: the policy will learn to write more")


def test_constants_are_found(tmp_path):
    found = check(tmp_path, "constant")["warning"]
    assert said(found, "every reward is 1: nothing to learn")
    assert said(found, "100% of 32 groups have equal rewards")


def test_exceptions_and_hangs_are_found(tmp_path):
    odd = check(tmp_path, "odd")
    assert said(odd["ok"], "deterministic") and said(odd["error"], "<object object>, which is no finite number (128x)")
    found = check(tmp_path, "faulty", timeout_s=3.0)
    assert said(found["error"], "failed on 32 of 128 samples")
    assert said(found["error"], "ZeroDivisionError: division by zero (32x)")
    assert said(found["warning"], "failed on 4 of 9 hostile texts, first a million characters, a million digits, open")


def test_slowness_is_found(tmp_path):
    assert said(check(tmp_path, "slow", example_samples()[:12])["warning"], "scores/s in one process: use more")


def test_groups_are_samples_of_one_prompt(tmp_path):
    samples = [RewardInput(i, "x" * (i // 3), "", f"prompt {i // 2}") for i in range(8)]
    # Lengths 0 0 | 0 1 | 1 1 | 2 2.
    assert said(check(tmp_path, "length", samples)["ok"], "75% of 4 groups have equal rewards")
