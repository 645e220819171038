"""Which verifier `config new` takes for which answers."""

import json

import pytest

from mindrlhf.rewards.fitting import fitting_verifier
from mindrlhf.rewards.registry import check_selection
from mindrlhf.rewards.selection import Selection

BOXED = "Solve it. Put your final answer within \\boxed{}."
RUBRIC = json.dumps([{"criterion": "It is kind.", "weight": 2}, {"criterion": "It is short."}])


@pytest.mark.parametrize(
    ("answers", "prompts", "verifier", "kind", "words"),
    [
        (["72", "10", "1,042", "$5.50", "18 apples"], [], "accuracy_reward", "numbers", "numbers"),
        (["steps\n#### 72", "so\n#### 5"], [], "accuracy_reward", "numbers", "numbers"),
        (["\\frac{3}{4}", "2\\sqrt{3}", "12", "(x+1)(x-2)", "[0, 1)"], [], "accuracy_reward", "expressions", "box"),
        (["\\frac{3}{4}", "x^2 + 1", "\\pi"], [BOXED] * 3, "qwen_accuracy_reward", "expressions", "ask for a box"),
        (["so \\boxed{x+1}", "$\\boxed{\\frac12}$"], [], "accuracy_reward", "expressions", "expressions"),
        (["3", "7"], [BOXED] * 2, "qwen_accuracy_reward", "numbers", "ask for a box"),
        (["A", "B", "(C)", "A, C"], [], "accuracy_reward", "choices", "letters"),
        (["Paris", "the red house", "Tuesday"], [], "accuracy_reward", "words", "<answer>"),
        (["assert f(1) == 2", '["assert g(2) == 3"]'], [], "code_execution", "tests", "unit tests"),
        (['{"inputs": ["1\\n"], "outputs": ["2\\n"]}'], [], "code_execution", "tests", "unit tests"),
        (["Zoey is a knave, Oliver is a knight"], [], "knights_and_knaves", "islanders", "knight"),
        ([RUBRIC], [], "rubric_judge", "texts", "rubrics"),
        (
            ["A long answer about the causes of the war, with several reasons."],
            [],
            "llm_judge",
            "texts",
            "longer texts",
        ),
        (["", "", "3"], [], "llm_judge", "texts", "no reference answer"),
    ],
)
def test_the_verifier_fits_the_answers(answers, prompts, verifier, kind, words):
    found = fitting_verifier(answers, prompts)
    assert (found.verifiers, found.kind) == ((verifier,), kind) and words in found.why
    assert "\n" not in found.why
    Selection(found.verifiers, (1.0,), by_choice=found.by_choice, options=found.options).check()


def test_a_few_slips_do_not_change_the_kind():
    assert fitting_verifier([*map(str, range(95)), *["see above"] * 5]).kind == "numbers"
    assert fitting_verifier([*map(str, range(50)), *["x+1"] * 50]).kind == "expressions"


def test_records_that_choose_are_taken_at_their_word():
    found = fitting_verifier(["1", "assert f(1) == 2"], choices=["accuracy_reward", "code_execution,format_reward"])
    assert found.verifiers == found.by_choice == ("accuracy_reward", "code_execution", "format_reward")
    check_selection(found.verifiers, (1.0,) * 3)
    found = fitting_verifier(["1", "assert f(1) == 2"], choices=["", "code_execution"])
    assert (found.verifiers, found.by_choice) == (("accuracy_reward", "code_execution"), ("code_execution",))
