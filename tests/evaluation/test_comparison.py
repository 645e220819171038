"""Before against after: the paired difference, the file that keeps it and the words that tell it."""

import json

import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.evaluation.comparison import compare, difference_text, summary_text, write_summary
from mindrlhf.evaluation.heldout import Evaluation


def make_evaluation(scores, step=0, completion="it is 7", questions="those") -> Evaluation:
    shown = [{"prompt": "What is\n3 + 4?", "completion": completion, "answer": "7", "reward": 1.0}]
    return Evaluation(step, "correct", {"correct": np.asarray(scores, np.float64)}, 5.0, shown, questions)


BEFORE = make_evaluation([[0, 1]] * 10 + [[0, 0]] * 10)
AFTER = make_evaluation([[1, 1]] * 10 + [[0, 1]] * 10, step=50, completion="7,\nsurely")


def test_the_difference_is_paired():
    summary = compare(BEFORE, AFTER)
    assert summary["before"]["accuracy"] == pytest.approx(0.25)
    assert summary["after"]["accuracy"] == pytest.approx(0.75)
    # Every prompt gained exactly one half: no spread, although both accuracies are uncertain.
    assert summary["difference"] == pytest.approx({"mean": 0.5, "low": 0.5, "high": 0.5})
    assert summary["before"]["low"] < 0.25 < summary["before"]["high"]
    assert summary["num_prompts"] == 20


def test_the_other_way_round_is_the_negative():
    scores = np.random.default_rng(0).integers(0, 2, (2, 30, 2))
    first, second = make_evaluation(scores[0]), make_evaluation(scores[1])
    there, back = compare(first, second)["difference"], compare(second, first)["difference"]
    assert there["mean"] == pytest.approx(scores[1].mean() - scores[0].mean())
    assert back["mean"] == pytest.approx(-there["mean"])
    assert there["low"] < there["mean"] < there["high"]


def test_different_prompts_cannot_be_compared():
    with pytest.raises(UserError, match="20 prompts against 1|1 against 20|the same prompts"):
        compare(BEFORE, make_evaluation([[1, 1]]))


def test_a_summary_compares_the_first_with_the_last(tmp_path):
    assert write_summary(tmp_path, []) is None
    assert write_summary(tmp_path, [BEFORE]) is None
    assert not list(tmp_path.iterdir())
    middle = make_evaluation([[1, 1]] * 20)
    summary = write_summary(tmp_path, [BEFORE, middle, AFTER])
    assert summary == compare(BEFORE, AFTER)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_a_summary_compares_evaluations_on_the_same_prompts(tmp_path):
    """A resumed run may have been given another file of held-out prompts."""
    others = [make_evaluation([[0, 0]] * 7, step, questions="others") for step in (20, 30, 40)]
    assert write_summary(tmp_path, [BEFORE, others[0]]) is None
    summary = write_summary(tmp_path, [BEFORE, *others])
    assert summary == compare(others[0], others[2]) and summary["num_prompts"] == 7 and summary["steps"] == [20, 40]
    lines = summary_text(summary).splitlines()
    assert lines[0] == "held-out accuracy on 7 prompts (95% interval), since step 20"
    assert "sample answers at step 20" in lines


def test_a_summary_of_a_single_prompt_is_json_that_any_program_reads(tmp_path):
    """One prompt has an interval without ends, for which JSON has no numbers."""
    write_summary(tmp_path, [make_evaluation([[0, 1]]), make_evaluation([[1, 1]])])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary["difference"]["mean"] == 0.5
    assert summary["difference"]["low"] is None


def test_the_text_tells_numbers_and_answers_in_lines():
    summary = compare(BEFORE, AFTER)
    summary["samples_before"][0]["answer"] = "\x1b[2J\ud800"  # no terminal obeys it, and UTF-8 has none
    lines = summary_text(summary).splitlines()
    assert r"\x1b[2J\ud800" in "".join(lines)
    assert lines[0] == "held-out accuracy on 20 prompts (95% interval)"
    assert lines[1].split()[:2] == ["before", "25.0%"]
    assert lines[2].split()[:2] == ["after", "75.0%"]
    assert lines[3].split()[1] == "+50.0" and lines[3].endswith("better")
    text = "\n".join(lines)
    assert "question  What is 3 + 4?" in text
    assert "answer    7, surely" in text
    assert "expected  7   reward 1" in text


def test_lines_of_answers_end_between_words_of_a_terminal(monkeypatch):
    """The launcher names the width of its terminal in COLUMNS; a log without one has a line for each."""
    summary = compare(BEFORE, AFTER)
    summary["samples_after"][0]["completion"] = "one\ntwo-three " * 9 + "x" * 40
    whole = summary_text(summary).splitlines()
    monkeypatch.setenv("COLUMNS", "34")
    folded = summary_text(summary).split("\n\n", 1)[1].splitlines()
    assert "  answer    one two-three one" in folded and f"{'':12}two-three one" in folded
    assert [line for line in folded if len(line) > 34] == [f"{'':12}{'x' * 40}"]
    assert " ".join(" ".join(folded).split()) == " ".join(" ".join(whole[5:]).split())


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.01, 0.3, "better"), (-0.3, -0.01, "worse"), (-0.1, 0.1, "no clear difference"), (0.0, 0.2, "no clear")],
)
def test_the_verdict_needs_the_whole_interval(low, high, verdict):
    text = difference_text({"mean": (low + high) / 2, "low": low, "high": high})
    assert verdict in text


def test_answers_that_changed_are_shown_first():
    def with_rewards(rewards, texts):
        shown = [
            {"prompt": f"q{index}", "completion": text, "answer": "7", "reward": reward}
            for index, (reward, text) in enumerate(zip(rewards, texts))
        ]
        return Evaluation(0, "correct", {"correct": np.zeros((6, 1))}, 5.0, shown, "those")

    before = with_rewards([0, 1, 0, 0.5, 1, 0], "aaaaaa")
    after = with_rewards([0, 1, 1, 0.5, 0.5, 0], "aaabaa")
    summary = compare(before, after)
    assert [one["prompt"] for one in summary["samples_before"]] == ["q2", "q4", "q3"]
    assert [one["reward"] for one in summary["samples_after"]] == [1, 0.5, 0.5]
