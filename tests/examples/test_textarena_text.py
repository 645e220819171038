"""Games of textarena itself, beside its own records of them; skipped where it is not installed."""

import json
import subprocess
import sys

import pytest

textarena = pytest.importorskip("textarena", reason="textarena is not installed: the extra 'environments'")

from example_tools import TEXTARENA  # noqa: E402
from textarena_text import TextArenaText, make_games  # noqa: E402

from mindrlhf.tools.episodes import EpisodePool, read_step  # noqa: E402

pytestmark = pytest.mark.timeout(120)
GUESS = json.dumps({"id": "GuessTheNumber-v0", "seed": 3})


def number_of(seed):
    game = textarena.make("GuessTheNumber-v0-raw")
    game.reset(num_players=1, seed=seed)
    return game.state.game_state["game_number"]


def test_a_game_is_played_as_textarena_has_it():
    number, game = number_of(3), TextArenaText()
    assert "guess the number between 1 and 20" in game.reset(GUESS)
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        text, reward, is_over = game.step(f"I say [{guess}]")
        if is_over:
            break
        assert reward == 0.0 and ("higher" in text) == (number > guess) and "Player" not in text
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
    assert (guess, reward, text) == (number, 1.0, "")


def test_a_lost_game_earns_what_textarena_gives():
    game, theirs = TextArenaText(), textarena.make("GuessTheNumber-v0-raw")
    wrong = 1 if number_of(3) != 1 else 2
    game.reset(GUESS)
    theirs.reset(num_players=1, seed=3)
    while True:
        _, reward, is_over = game.step(f"[{wrong}]")
        done, _ = theirs.step(f"[{wrong}]")
        assert is_over == done
        if done:
            break
    assert reward == theirs.close()[0][0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [("[]", "is not like"), ('{"seed": 1}', "is not like"), ('{"id": "TicTacToe-v0"}', "no game for one player")],
)
def test_records_that_name_no_game_are_refused(answer, message):
    with pytest.raises(ValueError, match=message):
        TextArenaText().reset(answer)


def test_episodes_of_two_environments_in_one_run(tmp_path):
    (tmp_path / "own.py").write_text(
        "class Echo:\n    def reset(self, answer): pass\n    def step(self, action): return action, 0.5, True\n"
    )
    with EpisodePool(f"{TEXTARENA}, {tmp_path / 'own.py'}:Echo", 1, 30.0, 2048) as pool:
        for episode, choice in enumerate(("TextArenaText", "Echo", "other")):
            pool.begin(episode, GUESS, {"environment": choice})
        first, second, third = (read_step(pool.step(episode, "[1]").result()) for episode in range(3))
    assert "number is higher" in first.observation or first.is_over
    assert (second.observation, second.reward, second.is_over) == ("[1]", 0.5, True)
    assert "the record chooses 'other', and there are TextArenaText, Echo" in third.failure


def test_the_example_prints_records_of_games():
    program = TEXTARENA.rpartition(":")[0]
    printed = subprocess.run([sys.executable, program, "GuessTheNumber-v0", "2", "3"], check=True, capture_output=True)
    records = [json.loads(line) for line in printed.stdout.splitlines()]
    assert records == list(make_games("GuessTheNumber-v0", 2, 3))
    assert records[0]["answer"] == GUESS and records[0]["environment"] == "TextArenaText"
