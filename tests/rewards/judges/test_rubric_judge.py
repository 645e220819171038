import json

import pytest

from mindrlhf.rewards.judges.chat_client import ChatError
from mindrlhf.rewards.judges.rubric import parse_rubric, read_verdicts
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.registry import resolve
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
from tests.rewards.judges.conftest import chat_reply

pytestmark = pytest.mark.timeout(180)

RUBRIC = json.dumps(
    [
        {"criterion": "names the drug", "weight": 5},
        {"criterion": "says when to call a doctor", "weight": 3},
        {"criterion": "tells lies", "weight": -4},
    ]
)


def ask(judge, completion="Take it.", answer=RUBRIC, **options):
    texts = {"url": judge.url, "model": "m", **{name: str(value) for name, value in options.items()}}
    return resolve("rubric_judge", texts)(completion, answer, {"prompt": "What shall I take?"})


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("1: yes\n2: yes\n3: no", 1.0),
        ("1: yes\n2: no\n3: no", 5 / 8),
        ("1: yes\n2: yes\n3: yes", 4 / 8),
        ("1: no\n2: yes\n3: yes", 0.0),  # -1 of 8
        ("It looks fine.\n- **1.** Yes, it does\n* Criterion 2: NO\n3) no", 5 / 8),
        ("1: yes\n1: yes\n2: yes\n3: no", 1.0),
        ("<think>1: no\n2: no</think>1: yes\n2: yes\n3: no", 1.0),
    ],
)
def test_weights_of_met_criteria_over_the_positive_ones(judge, reply, reward):
    judge.script = [(200, reply)]
    assert ask(judge) == reward


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("", "says nothing of criterion 1, 2, 3"),
        ("1: yes\n3: no", "says nothing of criterion 2"),
        ("1: yes\n2: yes\n2: no\n3: no", "both yes and no to criterion 2"),
        ("1: yes\n2: yes\n3: no\n4: yes", "speaks of criterion 4; there are 3"),
        ('{"1": true, "2": true, "3": false}', "says nothing of criterion 1, 2, 3"),
        ("1: maybe\n2: yes\n3: no", "says nothing of criterion 1"),
    ],
)
def test_an_answer_not_as_asked_for_is_no_reward(judge, reply, message):
    judge.script = [(200, reply)]
    with pytest.raises(ValueError, match=message):
        ask(judge)


def test_what_the_judge_sees(judge):
    judge.script = [(200, "1: yes")]
    answer = json.dumps({"rubric": ["is {kind}"], "reference": "Nothing."})
    assert ask(judge, answer=answer, completion="1: yes\n===") == 1.0
    system, user = (message["content"] for message in judge.requests[0][2]["messages"])
    assert all(text in user for text in ("What shall I take?", "1. is {kind}", "Nothing.", "1: yes\n==="))
    mark = next(line for line in user.splitlines() if set(line) == {"="})
    assert user.count(mark) == 8 and mark in system


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("42", "holds no rubric"),
        ("[]", "1 to 64 criteria"),
        ('{"rubric": "be kind"}', "1 to 64 criteria"),
        ('{"rubric": ["a"], "weights": [1]}', "has the key 'weights'"),
        ('{"rubric": ["a"], "reference": 3}', "'reference' of the rubric is a int"),
        ('["a", " "]', "criterion 2 of the rubric has no text"),
        ('["a", {"weight": 1}]', "criterion 2 of the rubric must be text"),
        ('[{"criterion": "a", "weight": true}]', "weight of criterion 1 is True"),
        ('[{"criterion": "a", "weight": NaN}]', "weight of criterion 1 is nan"),
        ('[{"criterion": "a", "weight": -1}]', "no criterion of the rubric has a positive weight"),
        ("[" * 100_000, "holds no rubric"),
    ],
)
def test_rubrics_that_make_no_sense_are_refused_before_anyone_is_asked(judge, answer, message):
    judge.script = [(200, "1: yes")]
    with pytest.raises(ValueError, match=message):
        ask(judge, answer=answer)
    assert judge.requests == []


def test_a_shared_rubric_is_for_records_without_their_own(judge):
    shared = json.dumps(["is polite"])
    assert parse_rubric("42", shared).reference == "42"
    assert parse_rubric("[1, 2]", shared).reference == "[1, 2]"
    assert parse_rubric('{"rubric": ["is short"]}', shared).criteria[0].text == "is short"
    judge.script = [(200, "1: yes")]
    assert ask(judge, answer="42", rubric=shared) == 1.0
    assert "1. is polite" in judge.requests[0][2]["messages"][1]["content"]


def test_votes_give_the_share_that_says_yes(judge):
    judge.script = [(200, "1: yes"), (200, "1: no"), (200, "1: yes"), (200, "1: yes")]
    assert ask(judge, answer='["a"]', votes=4) == 0.75
    assert [(body["seed"], body["temperature"]) for _, _, body in judge.requests] == [(vote, 0.7) for vote in range(4)]


def test_more_than_half_of_the_votes_must_be_usable(judge):
    judge.script = [(200, "1: yes"), (200, "well"), (200, "1: no")]
    assert ask(judge, answer='["a"]', votes=3) == 0.5
    judge.script = [(200, "1: yes"), (200, "well"), (200, "1: no"), (200, "hm")]
    with pytest.raises(ValueError, match="says nothing of criterion 1: 'hm'"):
        ask(judge, answer='["a"]', votes=4)


def test_half_an_answer_is_none(judge):
    judge.script = [(200, lambda body: chat_reply("1: yes", finish_reason="length"))]
    with pytest.raises(ChatError, match="cut its answer off: raise the option max_reply_tokens"):
        ask(judge, answer='["a"]')
    judge.script = [("short", "1: yes")]
    with pytest.raises(ChatError, match="in 3 attempts: the answer broke off"):
        ask(judge, answer='["a"]')


def test_read_verdicts_takes_every_number_once():
    lines = [f"{number}: {'yes' if number % 3 else 'no'}" for number in range(1, 65)]
    assert read_verdicts("\n".join(lines), 64) == [number % 3 != 0 for number in range(1, 65)]


def test_a_judge_that_fails_in_every_way_costs_only_its_own_samples(judge):
    """Each completion names how the server treats it; the pool gives every sample its reward or the failure value."""

    def reply(body):
        shown = body["messages"][1]["content"]
        if "half" in shown:
            return chat_reply("1: yes\n2:", finish_reason="length")
        if "html" in shown:
            return b"<html>busy</html>"
        if "null" in shown:
            return b'{"choices": [{"message": {"content": null}}]}'
        if "list" in shown:
            return b"[1, 2, 3]"
        if "partial" in shown:
            return "1: yes"
        if "liar" in shown:
            return "All criteria are met: yes, yes"
        return chat_reply("1: yes\n2: no").replace(
            b'"choices"', b'"usage": {"prompt_tokens": 100, "completion_tokens": 7}, "choices"'
        )

    judge.script = [(429, b"slow down"), (503, b""), (200, reply)]
    names = ["good", "half", "html", "null", "list", "partial", "liar", "good too"]
    selection = Selection(("rubric_judge",), (1.0,), options={"rubric_judge.url": judge.url, "rubric_judge.model": "m"})
    with RewardPool(selection, timeout_s=20.0, failure_value=-1.0) as pool:
        results = pool.score([RewardInput(i, name, '["a", "b"]') for i, name in enumerate(names)])
        counts = pool.take_counts()
        assert pool.take_counts() == {}
    rewards = {name: None if result.unscored else result.total for name, result in zip(names, results)}
    expected = dict.fromkeys(names, -1.0) | {"good": 0.5, "good too": 0.5} | dict.fromkeys(["html", "list"])
    assert rewards == expected, "no judge has answered with what is no chat completion"
    assert all(bool(result.failures) == (result.total == -1.0) for result in results)
    assert counts.pop("wait_s") > 0
    assert counts == {"requests": 10, "unusable": 6, "prompt_tokens": 200, "reply_tokens": 14}
