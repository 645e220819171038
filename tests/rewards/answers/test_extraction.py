import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.rewards.answers.extraction import MAX_BOXED_CHARS, final_answer, last_boxed


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
        ("\\boxed 5", None),
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
@settings(max_examples=500, deadline=None)
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
    assert final_answer(text) == answer


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("piece", "boxed", "answer"),
    [
        ("\\boxed{", None, None),
        ("{", None, None),
        ("}", "", ""),
        ("#### ", None, ""),
        ("<answer>", None, None),
        ("</answer>", None, None),
        ("\\", None, None),
    ],
)
def test_ten_megabytes_are_searched_in_linear_time(piece, boxed, answer):
    text = "\\boxed{" + piece * (10_000_000 // len(piece))
    assert last_boxed(text) == boxed
    assert final_answer(text) == answer


def test_a_box_too_long_for_an_answer_is_none():
    assert last_boxed("\\boxed{" + "1" * (MAX_BOXED_CHARS - 1) + "}") == "1" * (MAX_BOXED_CHARS - 1)
    assert last_boxed("\\boxed{" + "1" * MAX_BOXED_CHARS + "}") is None
