"""Prompts for gymnasium's FrozenLake: the rules and the first drawing, with the episode to begin as the answer.

    .venv/bin/python -m pip install 'gymnasium>=1.0,<2'
    .venv/bin/python examples/environments/lake_prompts.py --out runs/lake
"""

import argparse
import json
import random
from pathlib import Path

from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from gymnasium_text import GymnasiumText

RULES = (
    "You stand on a frozen lake. S is where you started, F is ice, H a hole that ends the game, and G the goal. Reach "
    "the goal. Each turn, end your answer with one number: 0 goes left, 1 down, 2 right, 3 up. The lake:"
)


def record(size: int, seed: int) -> dict[str, str]:
    """Return the record of one lake: another map for each seed."""
    answer = json.dumps({
        "id": "FrozenLake-v1", "seed": seed, "desc": generate_random_map(size, seed=seed), "is_slippery": False,
    })  # fmt: skip
    environment = GymnasiumText()
    drawing = environment.reset(answer)
    environment.close()
    return {"question": f"{RULES}\n{drawing}", "answer": answer}


def main() -> None:
    """Write train.jsonl and test.jsonl, of different lakes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--num-train", type=int, default=1000)
    parser.add_argument("--num-test", type=int, default=100)
    arguments = parser.parse_args()
    seeds = random.Random(0).sample(range(1 << 20), arguments.num_train + arguments.num_test)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", seeds[arguments.num_test :]), ("test", seeds[: arguments.num_test])):
        lines = "".join(json.dumps(record(arguments.size, seed)) + "\n" for seed in part)
        (arguments.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
