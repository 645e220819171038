import json
import os
import re
from pathlib import Path

import pytest
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.rewards.registry import resolve

accuracy_reward = resolve("accuracy_reward").function
qwen_accuracy_reward = resolve("qwen_accuracy_reward").function
format_reward = resolve("format_reward").function
length_reward = resolve("length_reward").function


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("\\boxed{42}", 1.0), ("\\boxed{42.0} done", 1.0), ("42", 0.0), ("\\boxed{42} \\boxed{41}", 0.0), ("", 0.0)],
)
def test_qwen_accuracy_reads_the_last_box_only(completion, reward):
    assert qwen_accuracy_reward(completion, "42") == reward


@pytest.mark.parametrize("verifier", [accuracy_reward, qwen_accuracy_reward])
def test_an_empty_reference_is_an_error(verifier):
    with pytest.raises(ValueError, match="reference answer is empty"):
        verifier("\\boxed{1}", " ")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>a\nb</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a < b</think><answer></answer>", 1.0),
        ("<think>a</think><answer>b</answer> end", 0.0),
        ("start <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</think></answer>", 0.0),
        ("<think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a<answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion, reward):
    assert format_reward(completion, "") == reward


def test_format_of_ten_megabytes():
    assert format_reward("<think>" + "<thin" * 2_000_000 + "</think><answer>1</answer>", "") == 1.0
    assert format_reward("<think>" * 1_500_000 + "</answer>", "") == 0.0


def test_length_reward_falls_with_length_and_pays_nothing_for_cut_or_blank_responses():
    assert length_reward("a", "", num_tokens=1024, finish_reason="stop") == 0.5
    assert length_reward("a", "", num_tokens=3072, finish_reason="stop") == 0.25
    assert length_reward("a", "", num_tokens=10, finish_reason="length") == 0.0
    assert length_reward(" ", "", num_tokens=1, finish_reason="stop") == 0.0


@pytest.mark.skipif(not os.environ.get("MINDRLHF_SHARED"), reason="needs GSM8K under MINDRLHF_SHARED")
def test_all_reference_solutions_of_gsm8k():
    path = Path(os.environ["MINDRLHF_SHARED"]) / "data" / "gsm8k" / "train.jsonl"
    solutions = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(solutions) == 7473
    for solution in solutions if RUNS_SLOW_TESTS else solutions[::8]:
        body, answer = solution.split("#### ")
        changed = str(int(answer.replace(",", "")) + 1)
        assert accuracy_reward(solution, answer) == 1.0, solution
        assert accuracy_reward(solution, solution) == 1.0, solution
        assert accuracy_reward(f"{body}#### {changed}", answer) == 0.0, solution
        # Without the marker: the last number, however it is dressed.
        plain = re.sub(r"[^0-9-]", "", answer)
        assert accuracy_reward(f"{body}In total that makes ${plain}.00, I think.", answer) == 1.0, solution
        assert qwen_accuracy_reward(f"{body}\\boxed{{{plain}}}", answer) == 1.0, solution
        assert qwen_accuracy_reward(f"{body}\\boxed{{{changed}}}", answer) == 0.0, solution
