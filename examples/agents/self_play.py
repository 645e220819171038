"""Self-play in games of `textarena` 0.7 for several players: one policy plays all of them, each for its own reward.

    .venv-textarena/bin/python examples/agents/self_play.py TicTacToe-v0 COUNT > train.jsonl

prints records, `question` and `answer`, of games with the seeds from 0 on; the first player reads the question. As
`tools.agent: examples/agents/self_play.py:agent`, with `tools.agent_python`, it plays a record's game. Each player is a
role (`model` in its calls) with a conversation of its own, and is trained against its own reward, compared with
those of the same player in the other games of the prompt. Of a reply without square brackets the last word is the
action. Who may write no more says nothing, and loses.
"""

import contextlib
import io
import json
import sys

import httpx
import textarena

NUM_PLAYERS = 2
ASK_TIMEOUT_S = 3600.0


def play(game: str, seed: int, ask) -> dict[str, float]:
    """Play a game; return the rewards of the players by their roles. ``ask`` is told a role and its messages."""
    with contextlib.redirect_stdout(io.StringIO()):
        env = textarena.make(f"{game}-raw")
        env.reset(num_players=NUM_PLAYERS, seed=seed)
        said: list[list[dict]] = [[] for _ in range(NUM_PLAYERS)]
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
            answer = client.post("/chat/completions", json={"model": role, "messages": messages})
            if answer.status_code in (400, 403):  # too long, or a budget is used up
                return ""
            return answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""

        return {"reward": play(chosen["id"], chosen["seed"], ask)}


def main() -> None:
    """Print records of a game."""
    game, count = sys.argv[1:]
    for seed in range(int(count)):
        read: list[str] = []

        def ask(role, messages, read=read):
            read.append(messages[0]["content"])
            return ""

        play(game, seed, ask)
        print(json.dumps({"question": read[0], "answer": json.dumps({"id": game, "seed": seed})}))


if __name__ == "__main__":
    main()
