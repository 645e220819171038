"""Choice of a verifier for the prompts of a file by their reference answers, for `mindrlhf config new`."""

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mindrlhf.rewards.answers.choices import reference_choices
from mindrlhf.rewards.answers.forms import read_form
from mindrlhf.rewards.answers.grading import reference_answer
from mindrlhf.rewards.answers.spelling import plain_spelling
from mindrlhf.rewards.answers.units import parse_quantity
from mindrlhf.rewards.verifiers.knights_and_knaves import roles
from mindrlhf.sandbox.code_tests.unit_tests import UnitTests, looks_like_tests

# Answers that are of another kind than the rest may be slips.
MIN_SHARE = 0.9
MAX_WORDS = 6

_MATH = re.compile(r"[\\^=+*/<>(\[{]|[0-9]")
_BOX = re.compile(r"\\boxed|\\fbox")
_TAGS = "<answer>"


class Fitting(NamedTuple):
    """Verifiers, one line that says why, the kind of the answers, and what else of the reward is to be set."""

    verifiers: tuple[str, ...]
    why: str
    kind: str = "any"
    by_choice: tuple[str, ...] = ()
    options: dict[str, str] = {}


def fitting_verifier(answers: Sequence[str], prompts: Sequence[str] = (), choices: Sequence[str] = ()) -> Fitting:
    """Choose by the answers of some records, what their prompts ask for, and the verifiers that records choose."""
    named = tuple(dict.fromkeys(name for choice in choices for name in choice.split(",") if name))
    if named:
        every = "" in choices
        verifiers = (*(("accuracy_reward",) if every and "accuracy_reward" not in named else ()), *named)
        by_choice = tuple(name for name in named if not (every and name == "accuracy_reward"))
        return Fitting(verifiers, "the records name their verifiers", "named", by_choice)
    given = [answer for answer in answers if answer.strip()]
    if len(given) < MIN_SHARE * max(1, len(answers)):
        return _judged("most records have no reference answer")
    kinds: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("tests", _is_tests),
        ("rubric", _is_rubric),
        ("islanders", lambda answer: bool(roles(answer))),
        ("choices", lambda answer: reference_choices(reference_answer(answer)) is not None),
        ("numbers", lambda answer: parse_quantity(plain_spelling(reference_answer(answer))) is not None),
        ("expressions", lambda answer: _is_expression(reference_answer(answer))),
        ("words", lambda answer: len(reference_answer(answer).split()) <= MAX_WORDS),
    )
    for kind, is_of_kind in kinds:
        # Numbers are expressions as well, and a few words may stand among them.
        if sum(map(is_of_kind, given)) >= MIN_SHARE * len(given):
            return _of_kind(kind, prompts)
    return _judged("the reference answers are longer texts, which no rule compares")


def _of_kind(kind: str, prompts: Sequence[str]) -> Fitting:
    if kind == "tests":
        return Fitting(("code_execution",), "the answers are unit tests, which the programs must pass", kind)
    if kind == "rubric":
        return _judged("the answers are rubrics, whose criteria another model checks", "rubric_judge")
    if kind == "islanders":
        return Fitting(("knights_and_knaves",), "the answers say who is a knight and who a knave", kind)
    asked = [prompt for prompt in prompts if _BOX.search(prompt)]
    if prompts and len(asked) >= MIN_SHARE * len(prompts):
        why = f"the answers are {kind}, and the prompts ask for a box, in which alone they count"
        return Fitting(("qwen_accuracy_reward",), why, kind)
    what = {
        "choices": "the answers are letters of choices: the one that a response ends up with counts",
        "numbers": "the answers are numbers: a response counts by the one that it marks or ends with",
        "expressions": "the answers are expressions, compared by value; have the prompts ask for \\boxed{}, so that it "
        "is clear where they begin and end",
        "words": "the answers are words, which count in <answer>...</answer> or a box only: have the prompts ask for "
        "one",
    }
    if kind == "words" and prompts and all(_TAGS in prompt for prompt in prompts):
        return Fitting(("accuracy_reward",), "the answers are words, which count in <answer>...</answer>", kind)
    return Fitting(("accuracy_reward",), what[kind], kind)


def _judged(why: str, name: str = "llm_judge") -> Fitting:
    options = {f"{name}.url": "http://127.0.0.1:8000/v1", f"{name}.model": "judge"}
    why += "; serve a model with 'mindrlhf rewards serve MODEL_DIR' and name it in reward.options"
    return Fitting((name,), why, "texts", options=options)


def _is_tests(answer: str) -> bool:
    try:
        UnitTests.check_record(answer, "", allow_own_helpers=True)
    except ValueError:
        return False
    return looks_like_tests(answer)


def _is_rubric(answer: str) -> bool:
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    criteria = value.get("rubric") if isinstance(value, dict) else value
    return isinstance(criteria, list) and any(isinstance(one, dict) and "criterion" in one for one in criteria)


def _is_expression(reference: str) -> bool:
    text = plain_spelling(reference)
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text))
    return bool(_MATH.search(text) or len(read_form(text).parts) > 1 or len(text) == 1) and len(words) <= 2
