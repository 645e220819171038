"""Handlers: known data sets to examples; what a record lacks is named."""

import json

import pytest

from mindrlhf.data.handlers import Message, RecordError, load_handler
from mindrlhf.errors import UserError


def test_gsm8k():
    solution = "He pays 3*400=<<3*400=1200>>1,200.\n#### 1,200"
    example = load_handler("gsm8k")({"question": "How much?", "answer": solution})
    assert example.messages == (Message("user", "How much?"),)
    assert (example.answer, example.response, example.question) == ("1200", solution, "How much?")


@pytest.mark.parametrize(
    ("written", "answer"),
    [("#### 1,234,567", "1234567"), ("####  -5 ", "-5"), ("#### 1,2", "1,2"), ("#### 3 #### 1,000.5", "1000.5")],
)
def test_gsm8k_final_number(written, answer):
    assert load_handler("gsm8k")({"question": "q", "answer": written}).answer == answer


@pytest.mark.parametrize("name", ["dapo_math_17k", "verl"])
def test_verl(name):
    fields = {
        "data_source": "math_dapo",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    }
    example = load_handler(name)(fields)
    assert example.messages == (Message("system", "s"), Message("user", "q"))
    assert (example.answer, example.question) == ("34", "q")


def test_map_keys_reaches_nested_and_dotted_names():
    handler = load_handler("map_keys", {"question": "in.text", "answer": "a.b", "response": "r"})
    example = handler({"in": {"text": "q"}, "a.b": 3, "r": "because"})
    assert (example.question, example.answer, example.response) == ("q", "3", "because")


@pytest.mark.parametrize(
    ("value", "verifier"),
    [("a", "a"), (" a , b_1 ", "a,b_1"), (["a", "b"], "a,b"), ("", ""), ([], "")]
    + [(3, "must name verifiers"), ([3], "must name verifiers"), ("a b", "'a b', which is no verifier")],
)
def test_map_keys_takes_the_chosen_verifiers(value, verifier):
    handler = load_handler("map_keys", {"question": "q", "verifier": "v"})
    if " " in verifier:
        with pytest.raises(RecordError, match=verifier):
            handler({"q": "why?", "v": value})
    else:
        assert handler({"q": "why?", "v": value}).verifier == verifier


def test_map_keys_without_answer_leaves_it_empty():
    example = load_handler("map_keys", {"question": "q"})({"q": "write", "answer": "ignored"})
    assert (example.answer, example.response) == ("", None)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("gsm8k", {"answer": "#### 1"}, "no field 'question'"),
        ("gsm8k", {"question": "q", "answer": "1"}, "no '#### ' before a final answer"),
        ("gsm8k", {"question": "q", "answer": "#### "}, "nothing after '#### '"),
        ("gsm8k", {"question": "  ", "answer": "#### 1"}, "has no text in 'content'"),
        ("gsm8k", {"question": 7, "answer": "#### 1"}, "must be text or a list of messages, found int"),
        ("deepscaler", {"answer": "1"}, "no field 'problem'"),
        ("deepscaler", {"problem": "p", "answer": None}, "field 'answer' is null"),
        ("deepscaler", {"problem": "p", "answer": b"1"}, "must be text, a number, a list or an object, found bytes"),
        ("deepscaler", {"problem": "p", "answer": " "}, "field 'answer' is empty"),
        ("dapo_math_17k", {"prompt": "p", "reward_model": {"ground_truth": "1"}}, "must be a list of messages"),
        ("dapo_math_17k", {"prompt": [], "reward_model": {"ground_truth": "1"}}, "holds no messages"),
        ("dapo_math_17k", {"prompt": [{"role": "user", "content": "p"}]}, "no field 'reward_model.ground_truth'"),
        (
            "dapo_math_17k",
            {"prompt": [{"role": "assistant", "content": "p"}], "reward_model": {"ground_truth": "1"}},
            "is from 'assistant', not from 'user'",
        ),
        (
            "dapo_math_17k",
            {"prompt": [{"role": 7, "content": "p"}], "reward_model": {"ground_truth": "1"}},
            "has role 7",
        ),
    ],
)
def test_unusable_record_names_the_field(name, fields, reason):
    with pytest.raises(RecordError, match=reason.replace("(", r"\(")):
        load_handler(name)(fields)


@pytest.mark.parametrize(
    ("name", "key_map", "message"),
    [
        ("gsm9k", None, "unknown handler 'gsm9k'; choose from gsm8k, deepscaler, dapo_math_17k, orca_pairs"),
        ("gsm8k", {"question": "q"}, "takes no key map"),
        ("map_keys", None, "needs to know the question's key"),
        ("map_keys", {"question": "q", "anwser": "a"}, "unknown field 'anwser'"),
    ],
)
def test_wrong_choice_of_handler(name, key_map, message):
    with pytest.raises(UserError, match=message):
        load_handler(name, key_map)


def test_orca_pairs():
    fields = {"system": "Be brief.", "question": "2 + 2?", "chosen": "4", "rejected": "5"}
    example = load_handler("orca_pairs")(fields)
    assert [(message.role, message.content) for message in example.messages] == [
        ("system", "Be brief."),
        ("user", "2 + 2?"),
    ]
    assert (example.response, example.rejected) == ("4", "5")
    assert len(load_handler("orca_pairs")({**fields, "system": ""}).messages) == 1
    with pytest.raises(RecordError, match="no field 'rejected'"):
        load_handler("orca_pairs")({"question": "q", "chosen": "4"})


def _chat(*contents):
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]


def _hh(*contents):
    return "".join(f"\n\n{('Human', 'Assistant')[index % 2]}: {text}" for index, text in enumerate(contents))


TRL = {
    "messages": ({"messages": _chat("a", "b", "c", "good")}, ("a", "b", "c"), ("good", None)),
    "texts": ({"prompt": "a", "completion": "good", "id": 3}, ("a",), ("good", None)),
    "chats": ({"prompt": _chat("a", "b", "c"), "completion": _chat("x", "good")[1:]}, ("a", "b", "c"), ("good", None)),
    "text, then a chat": ({"prompt": "a", "completion": _chat("x", "good")[1:]}, ("a",), ("good", None)),
    "pairs": ({"prompt": "a", "chosen": "good", "rejected": "bad"}, ("a",), ("good", "bad")),
    "pairs of chats": (
        {"prompt": _chat("a"), "chosen": _chat("x", "good")[1:], "rejected": _chat("x", "bad")[1:]},
        ("a",),
        ("good", "bad"),
    ),
    "whole chats beside a prompt": (
        {"prompt": "a", "chosen": _chat("a", "b", "c", "good"), "rejected": _chat("a", "b", "c", "bad")},
        ("a", "b", "c"),
        ("good", "bad"),
    ),
    "whole chats": (
        {"chosen": _chat("a", "good"), "rejected": _chat("a", "bad"), "messages": None},
        ("a",),
        ("good", "bad"),
    ),
    "hh-rlhf": (
        {"chosen": _hh("a", "b\n\nmore: b", "c", "good"), "rejected": _hh("a", "b\n\nmore: b", "c", "bad\n")},
        ("a", "b\n\nmore: b", "c"),
        ("good", "bad"),
    ),
}


@pytest.mark.parametrize(("fields", "contents", "responses"), TRL.values(), ids=TRL)
@pytest.mark.parametrize("name", ["trl", "ultrafeedback", "hh_rlhf"])
def test_forms_of_worked_answers_and_pairs(name, fields, contents, responses):
    example = load_handler(name)(fields)
    assert tuple(message.content for message in example.messages) == contents
    assert [message.role for message in example.messages] == ["user", "assistant", "user"][: len(contents)]
    assert (example.response, example.rejected) == responses


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chosen": _chat("a")}, "two messages or more"),
        ({"chosen": _chat("a", "b", "c")}, "is from 'user', not from 'assistant'"),
        ({"chosen": _chat("other", "b")}, "answer different conversations"),
        ({"chosen": "text"}, "with neither a 'prompt' beside it nor 'Human:' in it"),
        ({"chosen": "Well.\n\nHuman: a\n\nAssistant: b"}, "with neither a 'prompt' beside it"),
        ({"chosen": _hh("a")}, "two messages or more"),
        ({"prompt": 3, "chosen": "b"}, "field 'prompt' must be text or a list of messages"),
        ({"prompt": 3, "chosen": _chat("a", "b")[1:]}, "field 'prompt' must be text or a list of messages"),
        ({"text": "a"}, "none of 'messages', 'completion' beside 'prompt', and 'chosen' with 'rejected'"),
        ({"messages": {"role": "user"}}, "must be a chat of two messages or more"),
    ],
)
def test_records_without_a_response_to_train_on(fields, message):
    rejected = {"rejected": _chat("a", "bad")} if "chosen" in fields else {}
    with pytest.raises(RecordError, match=message):
        load_handler("trl")({**fields, **rejected})


def test_an_answer_with_structure_is_kept_as_json():
    handler = load_handler("map_keys", {"question": "q", "answer": "rubric"})
    rubric = [{"criterion": "names the café", "weight": 2}, "is short"]
    assert json.loads(handler({"q": "Where?", "rubric": rubric}).answer) == rubric
    assert handler({"q": "Where?", "rubric": "42 "}).answer == "42"
    for empty in ([], {}, None, [None], {"a": None}, '""', "[]"):
        with pytest.raises(RecordError):
            handler({"q": "Where?", "rubric": empty})
