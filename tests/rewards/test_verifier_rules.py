import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.rewards.registry import built_in, context_of

BOXED = "<think>6 * 7</think><answer>\\boxed{42}</answer>"


def verifier(name: str):
    return built_in(name)


@pytest.mark.parametrize(
    ("completion", "strict", "loose", "base"),
    [
        (BOXED, 1, 1, 1),
        (BOXED.replace("42", "41"), 1, 1, 0),
        ("<think>6 * 7</think>\n<answer>42</answer>", 0, 1, 0),
        ("<think>\\boxed{42}</think><answer>42</answer>", 0, 1, 0),
        ("<think>\\boxed{42}</think><answer>\\boxed{42}</answer>", 0, 1, 0),
        ("So: " + BOXED, 0, 1, 0),
        (BOXED + "<|im_end|>", 1, 1, 1),
        (BOXED + "<|im_end|>\n<|endoftext|><|endoftext|>\n", 1, 1, 1),
        (BOXED + "</s>", 1, 1, 1),
        (BOXED + "<|im_end|>I see", 0, 1, 0),
        ("<|im_start|>" + BOXED, 0, 1, 0),
        (BOXED.replace("42}", "42"), 1, 1, 0),
        ("<answer>42</answer><think>a</think>", 0, 0, 0),
        ("<think>a</think><answer>42", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_formats(completion, strict, loose, base):
    assert verifier("strict_format")(completion, "42") == strict
    assert verifier("loose_format")(completion, "42") == loose
    assert verifier("base_acc")(completion, "42") == base


@pytest.mark.parametrize(
    ("completion", "dapo", "math_17k"),
    [
        ("We get\nAnswer: 42", 1, 1),
        ("**Answer:** $42$.", 1, 1),
        ("answer : \\boxed{42}", 1, 1),
        ("Answer: 41\nAnswer: 42", 1, 1),
        ("Answer: 42\nAnswer: 41", -1, 0),
        ("Answer: 42\nThat was the answer.", 1, 1),
        ("\\boxed{42}", -1, 1),
        ("\\boxed{41}\nAnswer: 42", 1, 0),
        ("42", -1, 0),
        ("", -1, 0),
        ("Answer: 42" + " " * 400, -1, 1),
        ("Answer: " + "4" * 400, -1, 0),
        ("Answer:\n42", 1, 1),
        ("**Answer:**\n\n42\n", 1, 1),
        ("Answer:\n$$\n42\n$$", 1, 1),
        ("Answer: \\[\n42\n\\]", 1, 1),
        ("Answer: \\boxed{\n42\n}", 1, 1),
        ("Answer:\n41\n42", -1, 0),
        ("Answer:\n\nBecause it is so\n42", -1, 0),
        ("42\nAnswer:\n", -1, 0),
        ("Answer: 42<|im_end|>", 1, 1),
        ("Answer:\n42<|im_end|>\n<|endoftext|>", 1, 1),
        ("Answer: 42" + " " * 290 + "<|endoftext|>" * 100, 1, 1),
        ("Answer: \\boxed{42", -1, 0),
        ("Answer: 42\n\\boxed{42", 1, 0),
        ("Answer: The answer is 42.", 1, 1),
        ("Answer: not 42", -1, 0),
        ("Answer: The answer is not 42.", -1, 0),
    ],
)
def test_answer_lines_and_boxes(completion, dapo, math_17k):
    assert verifier("acc_for_dapo")(completion, "42") == dapo
    assert verifier("math_17k_acc")(completion, "42") == math_17k


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("Step 1: a\nStep 2: b\nStep 3: c", 1),
        ("First, a. Next, b. Finally, c.", 1),
        ("1. a\n2. b", 2 / 3),
        ("- a\n* b\n- c\n- d", 1),
        ("The first thing", 0),
        ("", 0),
    ],
)
def test_reasoning_steps(completion, reward):
    assert verifier("reasoning_steps")(completion, "") == pytest.approx(reward)


SOLUTION = "(1) Zoey is a knave\n(2) Oliver is a knight"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (f"<think>Zoey is a knight?</think><answer>{SOLUTION}</answer>", 1),
        ("<answer>Oliver is a knight, and zoey is a KNAVE.</answer>", 1),
        ("<answer>Zoey is a knave</answer>", 0),
        ("<answer>Zoey is a knight, Oliver is a knight</answer>", 0),
        (f"<answer>{SOLUTION}, Ava is a knight</answer>", 0),
        (f"<answer>{SOLUTION}, Zoey is a knight</answer>", 0),
        (SOLUTION, 0),
        ("", 0),
    ],
)
def test_knights_and_knaves(completion, reward):
    assert verifier("knights_and_knaves")(completion, SOLUTION) == reward


def test_a_puzzle_without_solution_is_an_error():
    with pytest.raises(ValueError, match="is no solution"):
        verifier("knights_and_knaves")("", "42")


@pytest.mark.parametrize(
    ("completion", "ngram_size", "penalty"),
    [
        ("a b c d e", 3, 0.0),
        ("a b c a b c", 3, 3 / 4 - 1),  # abc bca cab abc
        ("A b, a B. a b", 2, 2 / 5 - 1),  # ab ba ab ba ab
        ("so so so so", 1, 1 / 4 - 1),
        ("\u597d\u7684\u597d\u7684", 2, 2 / 3 - 1),
        ("a b", 3, 0.0),
        ("", 1, 0.0),
    ],
)
def test_repetition_penalty_by_hand(completion, ngram_size, penalty):
    assert verifier("repetition_penalty")(completion, "", ngram_size=ngram_size) == pytest.approx(penalty)


LOOPS = [
    "!", "$ ", "= \n", "a", "\U0001f600", "ha", "_", "-", "0", ". ", "?!", "\u0e01", "\u0430", "|-", "\n", " ",
    "\t\n", "\U0001f600\U0001f602 ", "**", "( )", "xyz", "\u2026 ", "1.", "}\n",
]  # fmt: skip


@pytest.mark.parametrize("part", LOOPS)
def test_repetition_penalty_sees_loops_of_signs_and_long_words(part):
    assert verifier("repetition_penalty")(part * 200, "") < -0.95
    assert verifier("repetition_penalty")(f"We add three and four. {part * 300}", "") < -0.9
    assert verifier("repetition_penalty")(f"We add three and four, which gives {part * 3} seven.", "") == 0.0


@settings(max_examples=50)
@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 4))
def test_repetition_penalty_counts_distinct_ngrams(words, size):
    ngrams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    expected = len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0
    assert verifier("repetition_penalty")(" ".join(words), "", ngram_size=size) == pytest.approx(expected)


@pytest.mark.parametrize(("num_tokens", "penalty"), [(0, 0), (80, 0), (85, -0.25), (100, -1), (130, -1)])
def test_overlong_penalty_by_hand(num_tokens, penalty):
    assert verifier("overlong_penalty")("", "", num_tokens=num_tokens, max_length=100, buffer=20) == penalty


def test_penalties_refuse_senseless_options():
    with pytest.raises(ValueError, match="buffer is 0"):
        verifier("overlong_penalty")("", "", num_tokens=1, max_length=100, buffer=0)
    with pytest.raises(ValueError, match="ngram_size is 0"):
        verifier("repetition_penalty")("", "", ngram_size=0)


TEXT_ONLY = [
    "accuracy_reward",
    "qwen_accuracy_reward",
    "base_acc",
    "acc_for_dapo",
    "math_17k_acc",
    "format_reward",
    "strict_format",
    "loose_format",
    "reasoning_steps",
    "repetition_penalty",
]
PIECES = [
    "\\boxed{",
    "}",
    "{",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "#### ",
    "Answer: ",
    "42",
    "9^",
    "$",
    "\\",
    "%",
]


@pytest.mark.parametrize("name", TEXT_ONLY)
@settings(max_examples=30)
@given(
    st.lists(
        st.sampled_from([*PIECES, " ", "\n", "cm", "\\text{", "B", "(", ",", "-", "/", "!", "\ud800"]), max_size=12
    )
)
def test_any_text_has_a_bounded_reward(name, pieces):
    text = "".join(pieces)
    reward = verifier(name)(text, "42")
    assert -1 <= reward <= 1
    assert verifier(name)(text, "42") == reward


UNITS = ["\\boxed{", "Answer: ", "<think>", "(A) ", "9^{", "Step 1:\n", "a ", "{", "}", "#### ", "</answer>", "\\"]
UNITS += ["1,", "-", "1.1/", "1e1", "$ ", "\u4e00", "1 ", "+", "half of ", "\\frac{", "<tool_call>", "the sum of 1 and"]


@pytest.mark.parametrize("name", TEXT_ONLY)
@pytest.mark.parametrize("unit", UNITS)
def test_ten_megabytes_of_anything_pass(name, unit):
    text = unit * (10_000_000 // len(unit))
    arguments = {"prompt": text[:100_000]} if "prompt" in context_of(verifier(name)) else {}
    assert -1 <= verifier(name)(text, "42", **arguments) <= (name == "reasoning_steps")


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        ("accuracy_reward", "so $1.414$"),
        ("qwen_accuracy_reward", "\\boxed{1.414}"),
        ("math_17k_acc", "\\boxed{1.414}"),
        ("acc_for_dapo", "Answer: 1.414"),
        ("base_acc", BOXED.replace("42", "1.414")),
    ],
)
def test_decimals_of_surds_are_right_within_a_tolerance_that_is_asked_for(name, completion):
    # 1.414 is 1.5e-4 below the square root of 2, relatively.
    wrong = -1 if name == "acc_for_dapo" else 0
    assert verifier(name)(completion, "\\sqrt{2}") == wrong
    assert verifier(name)(completion, "\\sqrt{2}", tolerance=1e-3) == 1
    assert verifier(name)(completion, "\\sqrt{2}", tolerance=1e-5) == wrong
    assert verifier(name)(completion.replace("1.414", "3.33"), "3.333", tolerance=1e-3) == 1
    assert verifier(name)(completion.replace("1.414", "3.3"), "3.333", tolerance=1e-3) == wrong
