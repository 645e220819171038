"""Tasks of reasoning-gym itself, made and scored; skipped where it is not installed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_tests import SLOW

reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: the extra 'environments'")

from mindrlhf.cli import main  # noqa: E402
from mindrlhf.errors import UserError  # noqa: E402
from mindrlhf.rewards.pool import RewardPool  # noqa: E402
from mindrlhf.rewards.selection import Selection  # noqa: E402
from mindrlhf.rewards.types import RewardInput  # noqa: E402
from mindrlhf.rewards.verifiers.reasoning_gym import make_tasks, reasoning_gym_score  # noqa: E402

# With scorers that read the answer alone, metadata, and give parts.
NAMES = (
    "chain_sum",
    "basic_arithmetic",
    "countdown",
    "word_sorting",
    "syllogism",
    "leg_counting",
    "prime_factorization",
)
REFUSED = ("arc_agi", "rearc", "composite")


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_package(name):
    theirs = reasoning_gym.create_dataset(name, size=4, seed=11)
    for record, entry in zip(make_tasks(name, 4, 11), theirs, strict=True):
        assert record["question"] == entry["question"]
        right = theirs.score_answer(entry["answer"], entry)
        for text in (f"I think <answer>{entry['answer']}</answer>", f"<think>nonsense</think>{entry['answer']}"):
            assert reasoning_gym_score(text, record["answer"]) == right >= 0.99
        assert reasoning_gym_score("<answer>no idea</answer>", record["answer"]) < 0.5


@given(st.text(max_size=60))
def test_no_text_breaks_a_scorer(text):
    for name in ("prime_factorization", "countdown"):
        (record,) = make_tasks(name, 1, 2)
        assert 0 <= reasoning_gym_score(text, record["answer"]) <= 1


def test_a_seed_makes_the_same_tasks_and_another_other_ones():
    one, again, other = (list(make_tasks("chain_sum", 5, seed)) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("answer", ["7", "[]", '{"dataset": "chain_sum"}'])
def test_records_of_other_tasks_are_refused(answer):
    with pytest.raises(ValueError, match="is no task"):
        reasoning_gym_score("7", answer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain_sums", "no data set 'chain_sums': did you mean chain_sum"),
        ("composite", "does not make 'composite' without settings of its own"),
    ],
)
def test_what_cannot_be_made_is_said(name, message):
    with pytest.raises(UserError, match=message):
        list(make_tasks(name, 2, 0))


def test_the_pool_scores_them_in_its_own_process():
    records = list(make_tasks("chain_sum", 3, 0))
    given = [json.loads(record["answer"])["entry"]["answer"] for record in records]
    with RewardPool(Selection(("reasoning_gym_score",), (1.0,))) as pool:
        results = pool.score([RewardInput(i, given[i % 2], one["answer"]) for i, one in enumerate(records)])
    assert [result.failures for result in results] == [{}] * 3
    assert [result.total >= 0.99 for result in results] == [True, True, given[0] == given[2]]


def test_data_get_writes_records_that_data_build_reads(tmp_path, capsys):
    assert (
        main(["data", "get", "reasoning-gym:chain_sum", "--size", "3", "--seed", "5", "--output", str(tmp_path)]) == 0
    )
    path = tmp_path / "chain_sum-3-seed5.jsonl"
    assert capsys.readouterr().out.strip() == str(path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(make_tasks("chain_sum", 3, 5))


def test_a_mistake_writes_no_file(tmp_path, capsys):
    for arguments in (["reasoning-gym:nothing"], ["reasoning-gym:chain_sum", "--size", "0"]):
        assert main(["data", "get", *arguments, "--output", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


@SLOW
@pytest.mark.parametrize("name", sorted({*reasoning_gym.factory.DATASETS} - {*REFUSED}))
def test_every_data_set_goes_through_json(name):
    for record in make_tasks(name, 2, 3):
        entry = json.loads(record["answer"])["entry"]
        if entry["answer"] is not None:
            assert reasoning_gym_score(f"<answer>{entry['answer']}</answer>", record["answer"]) > 0.9


@SLOW
@pytest.mark.parametrize("name", ["arc_agi", "rearc"])
def test_scorers_that_read_more_than_json_are_refused(name):
    with pytest.raises(UserError, match="reads what a JSON record cannot hold"):
        list(make_tasks(name, 1, 0))
