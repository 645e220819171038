import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.rewards.answers.extraction import (
    MAX_BOXED_CHARS,
    answer_marks,
    behind_thoughts,
    final_answer,
    last_boxed,
    prefilled,
    response_text,
)
from mindrlhf.rewards.answers.spelling import without_end_tokens
from mindrlhf.rewards.registry import built_in


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{42}", "42"),
        ("\\boxed{1} then \\boxed{2} end", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\sqrt{\\frac{a_{1}}{b}}} {x}", "\\sqrt{\\frac{a_{1}}{b}}"),
        ("\\boxed{}", ""),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{1} \\boxed{2", None),
        ("\\boxed 5", "5"),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def last_boxed_by_stack(text):
    """Slow and independent: walk the whole text once per opening, keeping a stack of what is open."""
    opening = None
    for i in range(len(text)):
        if text[i : i + 7] == "\\boxed{":
            opening = i + 7
    if opening is None:
        return None
    stack = ["box"]
    i = opening
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        if text[i] == "{":
            stack.append("brace")
        if text[i] == "}" and stack.pop() == "box":
            return text[opening:i]
        i += 1
    return None


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "}", "\\{", "\\}", "\\", "a", "4 ", "\n"]), max_size=25))
def test_last_boxed_equals_a_slow_implementation(pieces):
    text = "".join(pieces)
    assert last_boxed(text) == last_boxed_by_stack(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6*7 = 42\n#### 42", "42"),
        ("#### 41\nno:\n#### 42\nbye 43", "42"),
        ("<think>40</think><answer> 42 </answer>", " 42 "),
        ("<answer>\\boxed{42}</answer>", "42"),
        ("<answer>#### 42</answer>", "42"),
        ("<answer>41</answer> so #### 42", "42"),
        ("#### Step 1: add\nso \\boxed{42}.", "42"),
        ("\\boxed{41}\n#### 42", "42"),
        ("it is 41, no, 42.", "42"),
        ("<answer>41</answer> <answer>42", "41"),
        ("\\boxed{42", None),
        ("\\boxed{41} no, \\boxed{42", None),
        ("\\boxed{41\n#### 42", "42"),
        ("\\fbox{42}", "42"),
        ("#### 42<|im_end|>\n", "42"),
        ("it is 42.</s><pad><pad>", "42"),
        ("nothing", None),
        ("", None),
    ],
)
def test_final_answer(text, answer):
    text = without_end_tokens(text)
    assert final_answer(text, answer_marks(text)) == answer


def test_a_box_too_long_for_an_answer_is_none():
    assert last_boxed("\\boxed{" + "1" * (MAX_BOXED_CHARS - 1) + "}") == "1" * (MAX_BOXED_CHARS - 1)
    assert last_boxed("\\boxed{" + "1" * MAX_BOXED_CHARS + "}") is None


def behind_thoughts_by_steps(text):
    """Slow and independent: one character after the other, with the set of what is open."""
    opened, place, start = set(), 0, 0
    while place < len(text):
        for name in ("think", "reasoning"):
            if text.startswith(f"<{name}>", place):
                opened.add(name)
            if text.startswith(f"</{name}>", place):
                opened.discard(name)
                start = place + len(name) + 3
        place += 1
    return "" if opened else text[start:]


PIECES = ["<think>", "</think>", "<reasoning>", "</reasoning>", "a", "42 ", "\n", "<", ">", "/", "\\boxed{4}"]


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["", "<think>", "<think>\n\n</think>\n\n"]))
def test_behind_thoughts_equals_a_slow_implementation(pieces, prefill):
    text = "".join(pieces)
    prompt = f"<|im_start|>user\n<think>?<|im_end|>\n<|im_start|>assistant\n{prefill}"
    assert behind_thoughts(text) == behind_thoughts_by_steps(text)
    assert behind_thoughts(text, prompt).lstrip() == behind_thoughts_by_steps(prefill + text).lstrip()


ANSWERS = [
    "42",
    "\\boxed{42}",
    "\\boxed{41}",
    "#### 42",
    "<answer>42</answer>",
    "Answer: 42",
    "The answer is 41.",
    "no",
]


@given(st.lists(st.sampled_from(ANSWERS), max_size=4), st.lists(st.sampled_from(ANSWERS), max_size=3))
def test_no_draft_changes_a_reward(drafts, final):
    draft, rest = "\n".join(drafts), "\n".join(final)
    opened = "<|im_start|>assistant\n<think>\n"
    for name in ("accuracy_reward", "qwen_accuracy_reward", "math_17k_acc", "acc_for_dapo", "knights_and_knaves"):
        reference = "Zoey is a knave" if name == "knights_and_knaves" else "42"
        reward = built_in(name)(rest, reference)
        assert built_in(name)(f"<think>{draft}</think>\n{rest}", reference) == reward
        assert built_in(name)(f"{draft}</think>\n{rest}", reference, prompt=opened) == reward
        assert built_in(name)(f"{draft}\n{rest}", reference, prompt=opened) <= 0


@pytest.mark.parametrize(
    ("prompt", "written"),
    [
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", ""),
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("<\uff5cUser\uff5c>q<\uff5cAssistant\uff5c><think>\n", "<think>\n"),
        ("<|im_start|>assistant\nLet me solve this.\n<think>", "<think>"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\nThe answer: ", "The answer: "),
        ("User: q\nAssistant: <think>", "<think>"),
        ("Write <think> </think> <answer> </answer>", ""),
        ("Write <think> </think> <answer> </answer>\nq\nA:", ""),
        ("<|im_start|>user\nuse <think><|im_end|>\n<|im_start|>assistant\n", ""),
        ("", ""),
    ],
)
def test_what_a_template_has_written_before_the_completion(prompt, written):
    assert prefilled(prompt) == written
    assert response_text("x", prompt) == written + "x"
