"""Games of textarena (MIT) for one player, each as textarena tells it; as a program, it prints records of a game.

    .venv/bin/python -m pip install 'textarena>=0.7.4,<0.8'
    .venv/bin/python examples/environments/textarena_text.py GuessTheNumber-v0 1000 > games.jsonl
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import textarena


class TextArenaText:
    """One game that a record's answer names: ``{"id": "GuessTheNumber-v0", "seed": 3}``.

    The model's turn is the action, which most games take from the last square brackets in it. Rewards are those of
    the end, 0 before.
    """

    def reset(self, answer: str) -> str:
        """Begin, and return the rules, which belong into the prompt.

        Raises:
            ValueError: the answer names no game, or one for several players.
        """
        options = json.loads(answer)
        if not isinstance(options, dict) or not isinstance(options.get("id"), str):
            raise ValueError(f"the answer {answer[:80]!r} is not like {{'id': 'GuessTheNumber-v0', 'seed': 3}}")
        name, seed = options.pop("id"), options.pop("seed", None)
        with contextlib.redirect_stdout(io.StringIO()):  # which is the pipe of a tool process
            try:
                self._game = textarena.make(f"{name}-raw", **options)
                self._game.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ValueError(f"{name} is no game for one player: {error}") from error
            return self._shown()

    def step(self, action: str) -> tuple[str, float, bool]:
        """Take the model's turn."""
        with contextlib.redirect_stdout(io.StringIO()):
            is_over, _ = self._game.step(action)
            if not is_over:
                return self._shown(), 0.0, False
            rewards, _ = self._game.close()
        return "", float(rewards[0]), True

    def _shown(self) -> str:
        """Return the game's messages since the last call, without the player's own."""
        _, messages = self._game.get_observation()
        return "\n".join(text for sender, text, *_ in messages if sender == textarena.GAME_ID)


def make_games(name: str, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield records of a game, ``question`` and ``answer``, with the seeds from ``seed`` on."""
    for number in range(seed, seed + size):
        answer = json.dumps({"id": name, "seed": number})
        yield {"question": TextArenaText().reset(answer), "answer": answer, "environment": "TextArenaText"}


if __name__ == "__main__":
    game, count, *first = sys.argv[1:]
    for record in make_games(game, int(count), int(first[0]) if first else 0):
        print(json.dumps(record))
