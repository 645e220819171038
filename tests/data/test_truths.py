"""Truths: one reading of what is right, whatever form a record gives it."""

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.data.handlers import Row, load_handler
from mindrlhf.data.truths import (
    FROM_SEVERAL_BOXES,
    FROM_SOLUTION,
    OBJECT,
    SEVERAL,
    RecordError,
    read_truth,
)

READ = [
    ("7", "7", ""),
    (" 7 ", "7", ""),
    (7, "7", ""),
    (7.5, "7.5", ""),
    (Decimal("1.50"), "1.50", ""),
    (True, "True", ""),
    (["7"], "7", ""),
    ([7], "7", ""),
    ([[" 7 "]], "7", ""),
    ('["7"]', "7", ""),
    ("['7']", "7", ""),
    ("[7]", "7", ""),
    ('"7"', "7", ""),
    ({"answer": 7}, "7", ""),
    ({"answer": ["7"], "source": None}, "7", ""),
    ('{"ground_truth": "7"}', "7", ""),
    ("So it is.\n#### 1,200", "1200", FROM_SOLUTION),
    ("#### 7", "7", FROM_SOLUTION),
    (r"We get $1+1=\boxed{2}$.", "2", FROM_SOLUTION),
    (r"The larger one is $\boxed 2$.", "2", FROM_SOLUTION),
    (r"Thus \boxed{\frac{1}{2}} \% of it", r"\frac{1}{2}", FROM_SOLUTION),
    ([r"It is \boxed{\text{a}}"], r"\text{a}", FROM_SOLUTION),
    (r"\boxed{1} is wrong, \fbox{3} is right", "3", FROM_SEVERAL_BOXES),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}", FROM_SOLUTION),
    # Mathematics that only looks like structure, and prose that only looks like a mark.
    ("[1, 2]", "[1, 2]", ""),
    ("{1, 2}", "{1, 2}", ""),
    (r"\frac{1}{2}", r"\frac{1}{2}", ""),
    ("#### Summary\nThe text goes on.", "#### Summary\nThe text goes on.", ""),
    (r"\boxed{1", r"\boxed{1", ""),
    # What has structure is kept.
    (["7", "8"], '["7", "8"]', SEVERAL),
    ('["7", "8"]', '["7", "8"]', SEVERAL),
    ([1, 2], "[1, 2]", SEVERAL),
    ({"target": 24, "numbers": [4, 6]}, '{"target": 24, "numbers": [4, 6]}', OBJECT),
    ([{"criterion": "is short", "weight": 2}], '[{"criterion": "is short", "weight": 2}]', OBJECT),
    (["it names the café"], '["it names the café"]', OBJECT),
    (["assert f(1) == 2"], '["assert f(1) == 2"]', ""),
    ("assert f(1) == 2  #### 3", "assert f(1) == 2  #### 3", ""),
    ({"inputs": ["1"], "outputs": ["2"]}, '{"inputs": ["1"], "outputs": ["2"]}', ""),
]


@pytest.mark.parametrize(("value", "text", "how"), READ)
def test_each_form_is_read(value, text, how):
    truth = read_truth(value, "answer")
    assert (truth.text, truth.how) == (text, how)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("  ", "is empty"),
        ([], "is an empty list"),
        ({}, "is an empty object"),
        ({"answer": None}, "is an empty object"),
        ([""], "is empty"),
        ("[]", "is an empty list"),
        ('""', "is empty"),
        (["7", None], "holds a null"),
        (float("nan"), "is nan, which is no answer"),
        (float("inf"), "is inf, which is no answer"),
        ("####  ", "nothing after '#### '"),
        (r"so \boxed{ }", "ends with an empty"),
        (b"7", "found bytes"),
        ({"a": {1, 2}, "b": 3}, "is no JSON value"),
        ([[[[[[[[[["7"]]]]]]]]]], "nested too deeply"),
    ],
)
def test_what_is_no_answer_is_refused(value, reason):
    with pytest.raises(RecordError, match=reason.replace("(", r"\(")):
        read_truth(value, "answer")


WAYS = {
    "gsm8k": lambda value: {"question": "q", "answer": value},
    "deepscaler": lambda value: {"problem": "q", "answer": value},
    "dapo_math_17k": lambda value: {
        "prompt": [{"role": "user", "content": "q"}],
        "reward_model": {"ground_truth": value},
    },
    "verl": lambda value: {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": value}},
    "geo3k": lambda value: {"images": ["a.png"], "problem": "q <image>", "answer": value},
    "map_keys": lambda value: {"q": "q", "a": value},
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("value", [7, ["7"], {"answer": "7"}, "x\n#### 7", r"so \boxed{7}", '["7"]', [7]])
def test_all_handlers_read_alike(name, value):
    handler = load_handler(name, {"question": "q", "answer": "a"} if name == "map_keys" else None)
    assert handler(WAYS[name](value)).answer == "7"


def _wrapped(answer: str) -> st.SearchStrategy:
    """Any nesting of the forms that hold one answer."""
    plain = st.sampled_from([answer, f"Thus\n#### {answer}", f"Thus \\boxed{{{answer}}}.", f" {answer}\n"])
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            inner.map(lambda value: [value]),
            inner.map(lambda value: {"answer": value}),
            inner.map(lambda value: {"ground_truth": value, "style": None}),
            inner.filter(lambda value: not isinstance(value, str)).map(json.dumps),
        ),
        max_leaves=4,
    )


@given(st.data(), st.integers(-999, 999))
def test_any_nesting_of_forms_gives_the_answer(data, number):
    value = data.draw(_wrapped(str(number)))
    assert read_truth(value, "answer").text == str(number)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
    )
)
def test_any_json_value_is_read_or_refused(value):
    if value is None:
        return
    try:
        truth = read_truth(value, "answer")
    except RecordError:
        return
    assert truth.text.strip()


def test_how_a_truth_was_read_is_noted_on_the_row():
    row = Row({"problem": "p", "answer": r"so \boxed{7}"})
    load_handler("deepscaler")(row)
    assert row.notes == [f"answers {FROM_SOLUTION}"]
    row = Row({"question": "p", "answer": "so\n#### 7"})
    load_handler("gsm8k")(row)
    assert row.notes == []
