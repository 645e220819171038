"""Games of `textarena` 0.7 with its own scores: one policy plays all players of a game, each for its own reward.

    .venv-textarena/bin/python examples/agents/self_play.py Blackjack-v0 1 COUNT [FIRST] > train.jsonl
    .venv-textarena/bin/python examples/agents/self_play.py TicTacToe-v0 2 COUNT [FIRST] > train.jsonl
    .venv-textarena/bin/python examples/agents/self_play.py Blackjack-v0 1 COUNT FIRST Hit,Stand > warm_up.jsonl

prints records, `question` and `answer`, of games of so many players, with the seeds from FIRST (0) on; the first player
reads the question; with actions, in TRL's form, the turns of one who draws one of them each time. As
`tools.agent: examples/agents/self_play.py:agent`, with `tools.agent_python`, it plays a record's game. Each player is a
role (`model` in its calls) with a conversation of its own, and is trained against its own reward, compared with
those of the same player in the other games of the prompt. Of a reply without square brackets the last word is the
action. Who may write no more says nothing, and loses.
"""

import contextlib
import io
import json
import random
import sys

import httpx
import textarena

ASK_TIMEOUT_S = 3600.0
MOVE_TOKENS = 8  # or a model learns to talk until it may play no more


def play(game: str, num_players: int, seed: int, ask) -> dict[str, float]:
    """Play a game; return the rewards of the players by their roles. ``ask`` is told a role and its messages."""
    with contextlib.redirect_stdout(io.StringIO()):
        env = textarena.make(f"{game}-raw")
        env.reset(num_players=num_players, seed=seed)
        said: list[list[dict]] = [[] for _ in range(num_players)]
        is_over = False
        while not is_over:
            player, news = env.get_observation()
            told = [text for sender, text, *_ in news if sender != player]
            said[player].append({"role": "user", "content": "\n".join(told)})
            reply = ask(f"player{player}", said[player])
            said[player].append({"role": "assistant", "content": reply})
            is_over, _ = env.step(reply if "[" in reply else f"[{' '.join(reply.split()[-1:])}]")
        rewards, _ = env.close()
    return {f"player{player}": float(rewards[player]) for player in sorted(rewards)}


def agent(record: dict, base_url: str, api_key: str) -> dict:
    """Play the game that a record's answer names."""
    chosen = json.loads(record["answer"])
    headers = {"Authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=ASK_TIMEOUT_S) as client:

        def ask(role, messages):
            body = {"model": role, "messages": messages, "max_tokens": MOVE_TOKENS}
            answer = client.post("/chat/completions", json=body)
            if answer.status_code in (400, 403):  # too long, or a budget is used up
                return ""
            return answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""

        return {"reward": play(chosen["id"], chosen["players"], chosen["seed"], ask)}


def main() -> None:
    """Print records of a game, or the turns of one who draws actions."""
    game, players, count, *rest = sys.argv[1:]
    first, actions = int([*rest, "0"][0]), "".join(rest[1:]).split(",")
    draw = random.Random(first)
    for seed in range(first, first + int(count)):
        turns: list[dict] = []

        def ask(role, messages, turns=turns):
            action = f"[{draw.choice(actions)}]"
            turns.append({"prompt": [*messages], "completion": [{"role": "assistant", "content": action}]})
            return action

        play(game, int(players), seed, ask)
        answer = json.dumps({"id": game, "players": int(players), "seed": seed})
        records = turns if rest[1:] else [{"question": turns[0]["prompt"][0]["content"], "answer": answer}]
        print("\n".join(map(json.dumps, records)))


if __name__ == "__main__":
    main()
