import itertools
import re

import pytest

from mindrlhf.errors import UserError
from mindrlhf.rewards.judges.comparison import opponents, read_ranking, read_winner, shuffled
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.registry import resolve
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput

pytestmark = pytest.mark.timeout(180)


def shown_responses(body) -> list[str]:
    """The responses in the order in which the judge sees them."""
    user = body["messages"][1]["content"]
    return re.findall(r"^Response \w+:\n=+\n(.*?)\n=+\n", user, flags=re.MULTILINE | re.DOTALL)


def rank_by_length(body) -> str:
    lengths = [len(text) for text in shown_responses(body)]
    levels = [
        " = ".join(str(number) for number, other in enumerate(lengths, start=1) if other == length)
        for length in sorted(set(lengths), reverse=True)
    ]
    return f"Longer is better.\nRanking: {' > '.join(levels)}\n"


def prefer_longer(body) -> str:
    first, second = map(len, shown_responses(body))
    return "Winner: " + ("tie" if first == second else "A" if first > second else "B")


def score(judge, verifier, completions, num_workers=1, cache="", **options):
    texts = {"url": judge.url, "model": "m", "cache": cache, **options}
    selection = Selection(
        (verifier,), (1.0,), options={f"{verifier}.{name}": str(value) for name, value in texts.items()}
    )
    with RewardPool(selection, num_workers=num_workers, timeout_s=20.0, failure_value=-1.0) as pool:
        assert pool.compares
        results = pool.score(
            [RewardInput(i, text, "", "Why?", completions=tuple(completions)) for i, text in enumerate(completions)]
        )
        return [result.total for result in results], results, pool.take_counts()


def share_won(completions):
    """By hand: the share of other distinct responses that are shorter; ties count half."""
    distinct = set(completions)
    return [
        sum((len(one) > len(other)) + 0.5 * (len(one) == len(other)) for other in distinct - {one})
        / (len(distinct) - 1)
        for one in completions
    ]


GROUP = ["aa", "b", "cccc", "dd", "aa", "eee"]


@pytest.mark.parametrize(
    ("verifier", "answer", "num_questions"),
    [("ranking_judge", rank_by_length, 1), ("pairwise_judge", prefer_longer, 20)],
)
def test_rewards_are_the_shares_of_others_beaten_and_each_question_is_asked_once(
    judge, tmp_path, verifier, answer, num_questions
):
    judge.script = [(200, answer)]
    rewards, results, counts = score(judge, verifier, GROUP, num_workers=3, cache=tmp_path / "answers.sqlite")
    assert rewards == pytest.approx(share_won(GROUP))
    assert len(judge.requests) == num_questions == counts["requests"]
    # Another pool, as of a resumed run, asks nobody.
    again, _, counts = score(judge, verifier, GROUP, cache=tmp_path / "answers.sqlite")
    assert again == rewards and len(judge.requests) == num_questions and "requests" not in counts


def test_a_judge_that_loves_the_first_place_makes_no_difference(judge, tmp_path):
    judge.script = [(200, "Winner: A")]
    rewards, _, _ = score(judge, "pairwise_judge", GROUP, cache=tmp_path / "answers")
    assert rewards == [0.5] * len(GROUP)


def test_a_ring_asks_fewer_questions(judge, tmp_path):
    judge.script = [(200, prefer_longer)]
    completions = ["x" * length for length in range(1, 10)]
    rewards, _, _ = score(judge, "pairwise_judge", completions, cache=tmp_path / "answers", rounds=1)
    assert len(judge.requests) == 2 * 9
    assert rewards[0] == 0 and rewards[-1] == 1 and set(rewards) <= {0, 0.5, 1}


def test_meetings_on_a_ring_are_mutual():
    for num_responses, rounds in itertools.product((2, 3, 4, 5, 8), (0, 1, 2, 3)):
        met = [set(opponents(place, num_responses, rounds)) for place in range(num_responses)]
        assert all(place in met[other] for place in range(num_responses) for other in met[place])
        assert all(len(others) == min(2 * rounds or num_responses, num_responses - 1) for others in met)


def test_alone_it_earns_half_and_nobody_is_asked(judge, tmp_path):
    judge.script = [(500, b"")]
    for verifier in ("ranking_judge", "pairwise_judge"):
        rewards, results, _ = score(judge, verifier, ["same", "same"], cache=tmp_path / "answers")
        assert rewards == [0.5, 0.5] and not results[0].failures
    assert judge.requests == []


def test_votes_show_the_responses_in_other_orders(judge, tmp_path):
    judge.script = [(200, rank_by_length)]
    rewards, _, _ = score(judge, "ranking_judge", GROUP, cache=tmp_path / "answers", votes=5)
    assert rewards == pytest.approx(share_won(GROUP))
    orders = [tuple(shown_responses(body)) for _, _, body in judge.requests]
    assert len(orders) == 5 and len(set(orders)) > 1
    assert all(sorted(order) == sorted(set(GROUP)) for order in orders)
    assert shuffled(["a", "b", "c"], 0) == shuffled(["a", "b", "c"], 0)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("They are all good.", "ends with no 'Ranking"),
        ("Ranking: 1 > 2", "does not name each of 3 responses once"),
        ("Ranking: 1 > 2 > 2", "does not name each of 3 responses once"),
        ("Ranking: 1 > 2 > 4", "does not name each of 3 responses once"),
        ("Ranking: 3 2 1", "is not like 2 > 1 = 3"),
        ("Ranking: > >", "is not like 2 > 1 = 3"),
    ],
)
def test_rankings_that_are_none(reply, message):
    with pytest.raises(ValueError, match=message):
        read_ranking(reply, 3)


def test_rankings_with_ties():
    assert read_ranking("Ranking: 2 > 1 > 3", 3) == [0.5, 1.0, 0.0]
    assert read_ranking("Ranking: 1 = 2 = 3", 3) == [0.5, 0.5, 0.5]
    assert read_ranking("ranking: 1 > 3\n\n**Ranking:** [3] > [1] = [2]\nDone.", 3) == [0.25, 0.25, 1.0]


def test_unusable_answers_are_not_kept(judge, tmp_path):
    judge.script = [(200, "no idea"), (200, rank_by_length)]
    rewards, results, counts = score(judge, "ranking_judge", ["a", "bb"], cache=tmp_path / "answers")
    assert (rewards, counts["unusable"], counts.get("cached", 0)) == ([-1.0, 1.0], 1, 0)
    assert "ends with no 'Ranking" in results[0].failures["ranking_judge"]
    rewards, _, _ = score(judge, "ranking_judge", ["a", "bb"], cache=tmp_path / "answers")
    assert rewards == [0.0, 1.0]


def test_a_broken_cache_is_a_failure_of_the_verifier(judge, tmp_path):
    judge.script = [(200, rank_by_length)]
    (tmp_path / "answers").write_bytes(b"no database" * 100)
    rewards, results, _ = score(judge, "ranking_judge", ["a", "bb"], cache=tmp_path / "answers")
    assert rewards == [-1.0, -1.0]
    assert "as a cache of judges' answers" in results[0].failures["ranking_judge"]


def test_comparing_judges_need_a_cache():
    with pytest.raises(UserError, match="needs the option 'ranking_judge.cache': set it in reward.options"):
        resolve("ranking_judge", {"url": "http://127.0.0.1:9/v1", "model": "m"})


def test_too_many_responses_are_refused(judge, tmp_path):
    rewards, results, _ = score(judge, "ranking_judge", ["a", "bb", "ccc"], cache=tmp_path / "answers", max_responses=2)
    assert "3 responses are over max_responses 2" in results[0].failures["ranking_judge"]


@pytest.mark.parametrize(
    "reply",
    [
        "End with one line: Winner: A, or Winner: B, or Winner: tie.",
        "Winner: B\nThink briefly, then end with one line: **Winner: A**, or **Winner: B**",
    ],
)
def test_the_question_again_names_no_winner(reply):
    with pytest.raises(ValueError, match="Winner"):
        read_winner(reply)


def test_the_example_of_the_question_is_no_ranking():
    with pytest.raises(ValueError, match="Ranking"):
        read_ranking("Best first. For example: Ranking: 2 > 1 = 3", 3)
    assert read_ranking("For example: Ranking: 2 > 1 = 3\nRanking: 1 > 2 > 3", 3) == [1.0, 0.5, 0.0]
